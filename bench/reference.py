"""Hugging Face transformers as the reference: what a model's greedy answer is."""

import warnings
from pathlib import Path
from typing import Any

import torch


class Reference:
    """A model of transformers in float32, from a GGUF file read by transformers' own code."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def from_gguf(cls, path: Path) -> "Reference":
        """Takes about half a minute for 135M parameters.

        `from_pretrained(gguf_file=...)` does the same and would ask for the accelerate package.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoConfig, AutoModelForCausalLM
            from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
            outcome = model.load_state_dict(read["tensors"], strict=False)
        # The head is tied to the embedding.
        if set(outcome.missing_keys) - {"lm_head.weight"} or outcome.unexpected_keys:
            raise RuntimeError(f"transformers read another model: {outcome}")
        model.tie_weights()
        # Comparisons are over tokens, past any end: neither side stops early.
        model.generation_config.eos_token_id = None
        return cls(model.train(False))

    def num_wrong(self, prompt: list[int], answer: list[int]) -> int:
        """Tokens of the answer that are not transformers' likeliest, given all before them.

        0 means, by induction over the tokens, that the answer is transformers' own greedy one; one
        forward pass says so at a twentieth of the time that `generate` takes.
        """
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + answer])).logits[0]
        likeliest = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        return sum(ours != theirs for ours, theirs in zip(answer, likeliest, strict=True))

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """The greedy answer of transformers' own loop."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens
