"""A random Llama of 4 layers with its own tokenizer, made without any download."""

import pathlib
import random

WORDS = ["alpha", "beta", "gamma", "delta", "kv", "cache", "block", "tier", "node", "shared", "memory", "transfer"]
VOCABULARY = 512
# Ids that every such tokenizer has; the special ones are below.
TOKENS = range(3, 310)


def make_model(folder: pathlib.Path, seed: int = 0, layers: int = 4) -> str:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    rng = random.Random(seed)
    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(rng.choices(WORDS, k=40)) for _ in range(400)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        # Wide, so that the most likely token depends on the context.
        initializer_range=0.15,
    )
    network = LlamaForCausalLM(config).to(torch.bfloat16)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    import sys

    make_model(pathlib.Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
