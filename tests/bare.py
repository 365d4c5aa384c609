"""`pytest -p tests.bare`: where the extras are not installed, a test that needs one of them is skipped, by name."""

from __future__ import annotations

from collections.abc import Generator

import pytest

EXTRAS = frozenset(
    (
        "torch", "transformers", "tokenizers", "ray", "trl", "s3fs", "starlette", "httpx", "uvicorn", "numba", "pandas",
        "tinker", "atif", "datasets", "lance", "playwright", "matplotlib", "moto", "mkdocs", "openai",
    )
)  # fmt: skip
"""What may be absent; any other module may not. That the base stands without these, test_bare_install says."""


def absent(error: BaseException | None) -> str | None:
    """The extra that an error comes from, None where it comes from something else."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            return error.name
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module, or a folder by its conftest, that cannot be loaded."""
    report = yield
    call: pytest.CallInfo[object] | None = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None and (name := absent(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that asks for it while it runs."""
    report = yield
    if report.failed and call.excinfo is not None and (name := absent(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"needs {name}")
    return report
