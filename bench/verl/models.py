"""Makes the models that the harness trains: a Qwen2 of chosen size with random weights, a tokenizer of numbered words.

It decides shapes only. Nothing is downloaded; the same size and seed give the same files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

WORDS = 250
HEAD_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Size:
    """Of a transformer; `layers` of `width`, the inner layer of a block `inner` wide."""

    width: int
    inner: int
    layers: int


#: 27 tensors, about 0.5 MB in float32: what is quick to sync.
TINY = Size(width=64, inner=128, layers=2)
#: 87 tensors, 325 MB in float32, as verl hands it over: what a sync spends its time on is bytes.
LARGE = Size(width=1024, inner=2816, layers=7)


def make(folder: Path, size: Size, seed: int = 0) -> Path:
    """Configuration, weights and tokenizer of a model, in the folder."""
    logging.disable_progress_bar()
    tokenizer().save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=WORDS + 6,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=max(2, size.width // HEAD_WIDTH),
        num_key_value_heads=max(2, size.width // HEAD_WIDTH) // 2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<unk>", "\n", "<|im_end|>", "<|im_start|>"]
    words = special + [f"w{number}" for number in range(WORDS)]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    found.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return found
