"""Every option once (flag, variable, default, range, help); the only reader of os.environ."""

from dynamo.config.option import deprecations, environ, from_env, load, load_known, preset, to_env
from dynamo.config.parser import Option

__all__ = [
    "Option",
    "deprecations",
    "environ",
    "from_env",
    "load",
    "load_known",
    "preset",
    "to_env",
]
