"""Makes base/: a tiny BERT with random weights, so that all else can be tried without a download.

For a real one: `hf download NAME`, and `base = "NAME"`, or its folder, in the job's [task] table.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

BASE = Path(__file__).with_name("base")


def make_base(folder: Path = BASE) -> Path:
    """config.json, model.safetensors and tokenizer.json; every symbol of a text is a token."""
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    symbols = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: place for place, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        initializer_range=0.1,
    )
    BertModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(f"made {make_base()}")
