"""Every knob once (flag, variable, default, range, help); the only reader of os.environ."""

from dynamo.config.knob import Knob, describe, environ, from_env, knob, load, preset, to_env

__all__ = ["Knob", "describe", "environ", "from_env", "knob", "load", "preset", "to_env"]
