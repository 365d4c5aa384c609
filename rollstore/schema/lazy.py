"""Attributes computed when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class lazy(Generic[Value]):
    """An attribute that a method computes on first use and that then stands in the instance's `__dict__`.

    As functools.cached_property, without the lock that Python 3.11 holds for all instances of a class: a process forked
    while another thread holds that lock waits for it for ever. 3.12 dropped it too. Two threads that ask at once may
    both compute; either value is right, and one of them stays.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> lazy[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> Value: ...
    def __get__(self, instance: object | None, owner: type[Any]) -> lazy[Value] | Value:
        if instance is None:
            return self
        return instance.__dict__.setdefault(self._name, self._compute(instance))
