"""Special tokens around texts, and texts that are cut: the ids of the `tokenizers` library."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from dynamo.frontend.text.token_frames import Cut, Side, find_frames

WORDS = {text: number for number, text in enumerate(["[U]", "[C]", "[S]", "a", "b"])}
BERT = "[C]:0 $A:0 [S]:0 $B:1 [S]:1"
ROBERTA = "[C]:0 $A:0 [S]:0 [S]:0 $B:0 [S]:0"
LATE = "[C]:0 $A:0 [S]:0 [S]:1 $B:1"
texts = st.integers(0, 30).map(lambda size: "a b " * size)


def tokenizer(pair: str | None = BERT) -> Tokenizer:
    """One with the special tokens of ``pair``; None for none at all."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[U]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pair is not None:
        special = [(name, WORDS[name]) for name in ("[C]", "[S]")]
        single = "[C]:0 $A:0 [S]:0"
        made.post_processor = processors.TemplateProcessing(single, pair, special)
    return made


@pytest.mark.parametrize("form", [BERT, ROBERTA, LATE, None])
@given(first=texts, second=texts, limit=st.integers(4, 150), left=st.booleans())
def test_pairs(form: str | None, first: str, second: str, limit: int, left: bool) -> None:
    reference = tokenizer(form)
    frame = find_frames(reference).pair
    assert frame is not None
    side: Side = "left" if left else "right"
    contents = [
        array("I", reference.encode(text, add_special_tokens=False).ids) for text in (first, second)
    ]
    reference.enable_truncation(limit, direction=side)
    expected = reference.encode(first, second)
    ids, begins = frame.pair(contents[0], contents[1], Cut(limit, side))
    assert ids.tolist() == expected.ids
    assert [int(number >= begins) for number in range(len(ids))] == expected.type_ids


@pytest.mark.parametrize("form", [BERT, None])
@given(text=texts, limit=st.integers(2, 80), left=st.booleans())
def test_single_texts(form: str | None, text: str, limit: int, left: bool) -> None:
    reference = tokenizer(form)
    frame = find_frames(reference).single
    assert frame is not None
    content = array("I", reference.encode(text, add_special_tokens=False).ids)
    side: Side = "left" if left else "right"
    reference.enable_truncation(limit, direction=side)
    assert frame.single(content, Cut(limit, side)).tolist() == reference.encode(text).ids


def test_slices_take_special_tokens_too() -> None:
    frame = find_frames(tokenizer()).pair
    assert frame is not None
    a, b = array("I", [3] * 4), array("I", [4] * 4)
    right, begins = frame.pair(a, b, Cut(8, "right", slices=True))
    assert (right.tolist(), begins) == ([1, 3, 3, 3, 3, 2, 4, 4], 6)
    left, begins = frame.pair(a, b, Cut(3, "left", slices=True))
    assert (left.tolist(), begins) == ([4, 4, 2], 0)
    kept, begins = frame.pair(a, b, Cut(8, second_only=True))
    assert (kept.tolist(), begins) == ([1, 3, 3, 3, 3, 2, 4, 2], 6)


@pytest.mark.parametrize("form", ["$B:0 [S]:0 $A:0", "[C]:1 $A:0 [S]:0 $B:1", "$A:1 [S]:0 $B:0"])
def test_a_form_that_no_model_takes(form: str) -> None:
    assert find_frames(tokenizer(form)).pair is None
