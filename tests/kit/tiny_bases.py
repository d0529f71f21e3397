"""Tiny random language models with a tokenizer of bytes, as folders that transformers reads, and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["llama", "gpt2"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ '<' + m['content'] + '>' }}{% endif %}{% endfor %}"
)
POSITIONS = 64


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """BPE over the 256 symbols of bytes without merges: 259 tokens, exact for any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    symbols = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: place for place, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.chat_template = template
    return made


def with_borders(folder: Path, *, segments: bool = True) -> Path:
    """The base with a tokenizer that puts <s> and </s> around texts, and between two, as BERT's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(None)
    ends = [("<s>", 0), ("</s>", 1)]
    pair = "<s> $A </s> $B:1 </s>:1"
    template = TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = template
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_input_names = names if segments else names[::2]
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
    tokenizer.save_pretrained(folder)
    return folder


def write_base(folder: Path, kind: Kind = "llama", seed: int = 0) -> Path:
    """The folder, with config.json, model.safetensors and tokenizer.json in it."""
    import transformers

    common = {"vocab_size": 259, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "llama":
            config: Any = transformers.LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=POSITIONS,
                **common,
            )
            model: Any = transformers.LlamaForCausalLM(config)
        else:
            config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=POSITIONS, **common)
            model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_encoder(folder: Path, kind: str = "Bert", auto: str = "AutoModelForMaskedLM") -> Path:
    """A tiny random encoder of this kind, Bert, Roberta or DistilBert, as `auto` of transformers saves it."""
    import transformers

    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
    names = ("n_layers", "n_heads", "dim", "hidden_dim") if kind == "DistilBert" else names
    # RoBERTa's first position is behind that of what fills up a row.
    positions = POSITIONS + 3 * (kind == "Roberta")
    sizes = {**dict(zip(names, (2, 2, 32, 48), strict=True)), "max_position_embeddings": positions}
    config = getattr(transformers, f"{kind}Config")(vocab_size=259, pad_token_id=2, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(transformers, auto).from_config(config).save_pretrained(folder)
    byte_tokenizer(None).save_pretrained(folder)
    return folder


def sentences(count: int = 48) -> list[str]:
    """Short texts of one form, from which a model of bytes learns something at once."""
    wards, states = ("north", "south", "west"), ("stable", "better", "worse", "asleep")
    return [f"{wards[i % 3]} ward, bed {i % 7}: {states[i % 4]}." for i in range(count)]
