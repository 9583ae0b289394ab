"""Model directories with tokenizers of other families than the example model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<unk>", "<s>", "</s>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_TEXTS = ["hello world this is a test of many words " * 3, "Grüße aus Köln 你好 😀 ok"] * 5


def write_llama_like(directory: Path, strip: bool = True) -> None:
    """SentencePiece-style BPE with byte fallback, as Llama 2 has it; Gemma does not ``strip``."""
    model = Reference(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*SPECIAL, *BYTE_TOKENS], show_progress=False
    )
    model.train_from_iterator(_TEXTS, trainer)
    parsed = json.loads(model.to_str())
    parsed["added_tokens"] = [
        token for token in parsed["added_tokens"] if token["content"] in SPECIAL
    ]
    write_model(directory, parsed)


def write_metaspace(directory: Path, byte_fallback: bool = False) -> None:
    """Unigram with Metaspace, which `fastokens` does not support."""
    model = Reference(models.Unigram())
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.ByteFallback()] if byte_fallback else []
    model.decoder = decoders.Sequence([*steps, decoders.Metaspace()])
    bytes_ = BYTE_TOKENS if byte_fallback else ()
    trainer = trainers.UnigramTrainer(
        vocab_size=90 + len(bytes_),
        special_tokens=[*SPECIAL, *bytes_],
        unk_token="<unk>",
        show_progress=False,
    )
    model.train_from_iterator(_TEXTS, trainer)
    parsed = json.loads(model.to_str())
    parsed["model"]["byte_fallback"] = byte_fallback
    parsed["added_tokens"] = [
        token for token in parsed["added_tokens"] if token["content"] in SPECIAL
    ]
    write_model(directory, parsed)


def write_model(directory: Path, tokenizer: dict[str, Any], **config: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_bytes(orjson.dumps(tokenizer))
    settings = {"eos_token": "</s>", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    (directory / "config.json").write_bytes(orjson.dumps({"eos_token_id": 2} | config))
