"""What is trained: a two-layer Qwen2 with random weights, and 64 prompts.

Everything is made on the spot, the same each time; nothing is downloaded. What is good is in `reward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward import WORDS

SPECIAL = ("<pad>", "<eos>", "<unk>", "\n", "<|im_end|>", "<|im_start|>")
PROMPTS = 64
VALIDATION_PROMPTS = 8
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} <|im_end|>\n{% endfor %}{% if add_generation_prompt %}w1 {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Task:
    """Where the model and the prompts lie."""

    model: Path
    train: Path
    validation: Path


def make(folder: Path) -> Task:
    """Writes model, tokenizer and prompts into the folder."""
    task = Task(model=folder / "model", train=folder / "train.parquet", validation=folder / "validation.parquet")
    _tokenizer().save_pretrained(task.model)
    _model().save_pretrained(task.model)
    rows = [_row(index) for index in range(PROMPTS)]
    _write_parquet(rows, task.train)
    _write_parquet(rows[:VALIDATION_PROMPTS], task.validation)
    return task


def _tokenizer() -> Any:
    """One token per word, w0 to w249."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{number}" for number in range(WORDS))]
    words_by_token = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(words_by_token, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.add_tokens([AddedToken("\n"), *(AddedToken(mark, special=True) for mark in SPECIAL[4:])])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _model() -> Any:
    """About 140,000 parameters in 27 tensors, random, the same each time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(SPECIAL) + WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<pad>"),
        eos_token_id=SPECIAL.index("<eos>"),
        bos_token_id=SPECIAL.index("<eos>"),
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def _row(index: int) -> dict[str, Any]:
    """One prompt in the form that verl's data sets have."""
    return {
        "data_source": "words",
        "prompt": [{"role": "user", "content": f"w{index % 20} w{(index * 7) % 50} w3"}],
        "ability": "words",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": index, "split": "train"},
    }


def _write_parquet(rows: list[dict[str, Any]], file: Path) -> None:
    import pandas

    pandas.DataFrame(rows).to_parquet(file)
