"""Prompts whose lengths and contents reach the corners: blocks, chunks, scripts, control tokens."""

from pathlib import Path

TEXTS = (
    "A",
    "The",
    "What is the capital of France?",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Wie geht es dir heute?",
    "日本の首都は",
    "🎉🎉🎉 Party time",
    "SELECT name, price FROM products WHERE",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nIs water wet?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "   leading spaces\n\n\tand a tab",
    '{"name": "tandem", "version": ',
    "Water boils at 100 degrees Celsius. Water freezes at",
    "Roses are red,\nViolets are blue,\n",
)
# Around the edges of blocks of 16 and chunks of 64, and several blocks beyond three chunks.
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 128, 150, 211)
PROSE = (
    "The history of the printing press begins long before the fifteenth century. Wooden blocks "
    "were carved by hand, inked and pressed on cloth, and later on paper. Each page asked for a "
    "block of its own, and each block for weeks of work. Movable type changed the arithmetic: a "
    "letter, once cast, could serve on a thousand pages. Workshops spread from town to town along "
    "the rivers, and with them came pamphlets, almanacs, maps and arguments. Readers who had owned "
    "one book in a lifetime could now compare two accounts of one event, and find that they did "
    "not agree. "
)
BLOCK_SIZE = 16
CHUNK_TOKENS = 64


def parity_prompts(tokenizer_path: Path) -> list[list[int]]:
    """Token ids of all prompts, control tokens where the texts name them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    prose = tokenizer.encode(PROSE * 3).ids
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    return texts + [prose[shift : shift + n] for shift, n in enumerate(LENGTHS)]
