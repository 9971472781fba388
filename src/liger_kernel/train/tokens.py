"""Text to blocks of token ids: the checkpoint's tokenizer, or a byte-level BPE trained on the text itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_kernel.train import UsageError
from liger_kernel.train.model import Source
from liger_kernel.train.settings import Settings
from liger_kernel.train.text import documents

_POOL = 4  # times the tokens of the run
_TRAINED_VOCABULARY = 8192  # plenty for a demonstration, and trained in seconds
_TRAINING_CHARACTERS = 4_000_000
_END = "<|endoftext|>"


@dataclass(frozen=True)
class Encoder:
    """`encode(text) -> ids`, and the id that ends a document if there is one."""

    encode: Callable[[str], list[int]]
    end: int | None


def blocks(source: Source, settings: Settings) -> Tensor:
    """Blocks of the text in a seeded random order: int64 `[steps, ranks * batch, seq]`.

    Documents follow each other without padding, an end-of-text id between them. The blocks are drawn from four times
    as much text as the run reads (if there is as much), so that a step does not see one file alone.

    Raises:
        UsageError: the text is too short, or an id lies outside the model's vocabulary.
    """
    limit = getattr(source.text_config, "max_position_embeddings", None)
    if limit is not None and settings.seq > limit:
        raise UsageError(f"--seq {settings.seq}: {source.title} knows {limit} positions.")
    ids = _read(encoder(source, settings), settings)
    rows = settings.ranks * settings.batch
    if len(ids) < settings.tokens:
        raise UsageError(
            f"the text holds {len(ids):,} tokens; {settings.steps} steps of {rows} x {settings.seq} need "
            f"{settings.tokens:,}. Give more text, or ask for less."
        )
    largest, size = int(ids.max()), source.text_config.vocab_size
    if largest >= size:
        raise UsageError(
            f"{source.title}: its tokenizer makes id {largest}, its vocabulary ends at {size - 1}."
        )
    pool = ids[: len(ids) // settings.seq * settings.seq].view(-1, settings.seq)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(settings.seed))
    return pool[order[: settings.steps * rows]].view(-1, rows, settings.seq)


def encoder(source: Source, settings: Settings) -> Encoder:
    """The tokenizer of a checkpoint; for random weights one trained on the text."""
    if not source.pretrained:
        return _trained(source, settings)
    tokenizer = source.tokenizer()

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return Encoder(encode, tokenizer.eos_token_id)


def _trained(source: Source, settings: Settings) -> Encoder:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    size = min(source.text_config.vocab_size, _TRAINED_VOCABULARY)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size <= len(alphabet):
        raise UsageError(
            f"{source.title}: a vocabulary of {size} has no room for the 256 bytes and an end-of-text id."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[attr-defined]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_beginning(settings), trainer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return Encoder(encode, tokenizer.token_to_id(_END))


def _beginning(settings: Settings) -> Iterator[str]:
    read = 0
    for document in documents(settings.text, settings.seed):
        yield document
        read += len(document)
        if read >= _TRAINING_CHARACTERS:
            return


def _read(encoder: Encoder, settings: Settings) -> Tensor:
    pieces: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    held = 0
    for document in documents(settings.text, settings.seed):
        ids = encoder.encode(document) + ([] if encoder.end is None else [encoder.end])
        pieces.append(torch.tensor(ids, dtype=torch.int64))
        held += len(ids)
        if held >= _POOL * settings.tokens:
            break
    return torch.cat(pieces)
