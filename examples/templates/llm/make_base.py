"""Makes base/: a tiny language model with random weights, so that all else can be tried without a download.

For a real one: `hf download NAME`, and `base = "NAME"` in the job's [task] table.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BASE = Path(__file__).with_name("base")


def make_base(folder: Path = BASE) -> Path:
    """config.json, model.safetensors and tokenizer.json; every symbol of a text is a token."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    symbols = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: place for place, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(f"made {make_base()}")
