from typing_extensions import Buffer

__all__ = ["measure"]

def measure(text: Buffer, max_weight: int, max_depth: int) -> tuple[int, int, bytes]:
    """What decoding a JSON text costs: ``(weight, depth, name)``, without decoding it.

    A string, literal or number weighs 1, an object or array 4, each member of an object 8 more.
    A number of more than 19 characters weighs half its length; one with an exponent 8, and at
    least 1,024 if it is that long. One unit is about 40 ns.
    Stops as soon as a limit is exceeded; ``name`` is then the top-level member where that was, as
    it is written. Says nothing of whether the text is valid. Releases the GIL. O(bytes).
    """
