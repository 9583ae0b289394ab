"""Every option once (flag, variable, default, range, help); the only reader of os.environ."""

from dynamo.config.option import (
    Option,
    deprecations,
    environ,
    from_env,
    load,
    load_known,
    option,
    preset,
    to_env,
)

__all__ = [
    "Option",
    "deprecations",
    "environ",
    "from_env",
    "load",
    "load_known",
    "option",
    "preset",
    "to_env",
]
