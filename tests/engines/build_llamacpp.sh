#!/bin/bash
# Build llama.cpp's server and libraries, and the wheel of its Python bindings, once, into the user's cache
# (ROLLSTORE_CACHE overrides the place): they take ten minutes of a free core or two to compile.
# Then install the bindings into the environment named by the first argument.
set -euo pipefail
version=0.3.36
environment=$(realpath "$1")
cache=${ROLLSTORE_CACHE:-$HOME/.cache/rollstore}
place=$cache/llama.cpp-$version
export PATH=$environment/bin:$PATH

if [ ! -e "$place" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    command -v cmake > /dev/null || pip install --quiet cmake
    pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" "llama-cpp-python==$version"
    tar -xzf "$work"/llama_cpp_python-$version.tar.gz -C "$work"
    source=$work/llama_cpp_python-$version
    cmake -S "$source/vendor/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=\$ORIGIN" -DGGML_NATIVE=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    nice cmake --build "$work/build" --target llama-server --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-2}"
    # The bindings without a library of their own: they take the one above, which LLAMA_CPP_LIB_PATH names.
    CMAKE_ARGS=-DLLAMA_BUILD=OFF pip wheel --quiet --no-deps --wheel-dir "$cache/wheels" "$source"
    mkdir -p "$work/place"
    cp -a "$work"/build/bin/llama-server "$work"/build/bin/lib*.so* "$work/place"
    mkdir -p "$cache"
    mv "$work/place" "$place"
fi
pip install --quiet --no-deps --no-index --find-links "$cache/wheels" "llama-cpp-python==$version"
pip install --quiet diskcache jinja2 typing-extensions numpy
