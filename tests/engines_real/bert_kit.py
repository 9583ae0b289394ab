"""Small BERT models with random weights: a cross-encoder, a classifier, an embedder."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from weights_kit import Numbers, write_safetensors

HIDDEN = 128
INTERMEDIATE = 256
LAYERS = 2
HEADS = 2
CONTEXT = 128
LABELS = ("bad", "fair", "good")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TEXT = """the a of in is are to what which who where when how and for on with capital city country
paris france berlin germany london england dog cat bird tree river mountain music art"""


def write_bert(directory: Path, labels: Sequence[str] = (), seed: int = 5) -> Path:
    """A BERT with a classifier for ``labels``; without any it only embeds."""
    directory.mkdir(parents=True)
    vocabulary = _write_tokenizer(directory)
    names = {str(number): label for number, label in enumerate(labels)}
    config = {
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
        "model_type": "bert",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "hidden_act": "gelu",
        "max_position_embeddings": CONTEXT,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "torch_dtype": "float32",
    }
    if labels:
        config |= {"id2label": names, "label2id": {label: int(n) for n, label in names.items()}}
    (directory / "config.json").write_text(json.dumps(config))
    numbers = Numbers(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> array[float]:
        if name.endswith("LayerNorm.weight"):
            return array("f", [1.0]) * shape[0]
        return numbers.tensor(shape, 1.0 if "embeddings" in name else shape[-1] ** -0.5)

    shapes = _shapes(vocabulary, "bert." if labels else "")
    if labels:
        shapes |= {"classifier.weight": (len(labels), HIDDEN), "classifier.bias": (len(labels),)}
    write_safetensors(directory / "model.safetensors", shapes, tensor)
    return directory


def _write_tokenizer(directory: Path) -> int:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    texts = [*_SPECIAL, *"?.,!", *letters, *(f"##{letter}" for letter in letters), *_TEXT.split()]
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocabulary)


def _shapes(vocabulary: int, prefix: str) -> dict[str, tuple[int, ...]]:
    """The tensors of the encoder."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocabulary, HIDDEN),
        "embeddings.position_embeddings.weight": (CONTEXT, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        base = f"encoder.layer.{layer}"
        for name, height, width in (
            ("attention.self.query", HIDDEN, HIDDEN),
            ("attention.self.key", HIDDEN, HIDDEN),
            ("attention.self.value", HIDDEN, HIDDEN),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", INTERMEDIATE, HIDDEN),
            ("output.dense", HIDDEN, INTERMEDIATE),
        ):
            shapes[f"{base}.{name}.weight"] = (height, width)
            shapes[f"{base}.{name}.bias"] = (height,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{base}.{name}.weight"] = (HIDDEN,)
            shapes[f"{base}.{name}.bias"] = (HIDDEN,)
    shapes["pooler.dense.weight"] = (HIDDEN, HIDDEN)
    shapes["pooler.dense.bias"] = (HIDDEN,)
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}
