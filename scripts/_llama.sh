# Sourced by test-engines, inside the engine's environment: builds llama.cpp's llama-server into it.
#
# No index has a build of llama-server, but the source archive of llama-cpp-python contains
# llama.cpp. It compiles in about four minutes on two cores; -O0 is not faster.

LLAMA_SOURCE="llama-cpp-python==0.3.36"
LLAMA_HASH="sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
LLAMA_GGUF="gguf==0.19.0"

llama_ready() {
    local made="$VIRTUAL_ENV/.installed-llama" wanted="$LLAMA_SOURCE $LLAMA_GGUF"
    (
        flock 9
        [ "$(cat "$made" 2>/dev/null)" = "$wanted" ] && exit 0
        echo "scripts: building llama-server (some minutes the first time)" >&2
        _llama_build && echo "$wanted" >"$made"
    ) 9>"$VIRTUAL_ENV/.lock-llama"
}

_llama_build() {
    local work="$VIRTUAL_ENV/llama" pip=(python -m pip -q --disable-pip-version-check)
    rm -rf "$work"
    mkdir -p "$work"
    "${pip[@]}" install "$LLAMA_GGUF" >&2 || return
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
