"""A tiny model of any class, inputs that it takes, and one training step of it."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_kernel.coverage.shrink import WORDS, parts, shrunk

_FRAMES = 64  # of a sound, and pixels of an image where no config says how many
_FLOOR = 5e-3  # what vanishes in exact arithmetic (a bias in front of a norm) holds a few fp32 roundings of the largest
_BANDS = ("num_mel_bins", "input_feat_per_channel", "feature_size")

Inputs = dict[str, Any]
Step = tuple[Tensor, dict[str, Tensor]]  # loss, gradients by name


def tiny(cls: Any, seed: int = 0) -> Any:
    """A tiny fp32 model in training mode, with eager attention and weights large enough to tell layers apart."""
    config = shrunk(cls.config_class())
    for part in parts(config):
        part._attn_implementation = "eager"
    torch.manual_seed(seed)
    return awake(cls(config))


def awake(model: Any) -> Any:
    """The model in training mode, every weight a little off its initial value: no zeros, no ones, no equal layers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.train()


def has_head(model: Any) -> bool:
    """Whether some layer gives a value for each word: speech models predict other things."""
    words = {vars(part).get("vocab_size", 0) for part in parts(model.config)}
    return any(getattr(module, "out_features", -1) in words for module in model.modules())


def text(rows: int = 2, tokens: int = 12, seed: int = 1) -> Inputs:
    """input_ids and labels `[rows, tokens]`, the first quarter of the labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[:, : tokens // 4] = -100
    return {"input_ids": ids, "labels": labels}


def offers(model: Any) -> Iterator[Inputs]:
    """Inputs that a model may take, the plainest first: text, text beside pictures or sounds, sounds alone."""
    words = text()
    yield words
    takes = inspect.signature(model.forward).parameters
    config = _merged(model.config)
    for media in _media(config):
        given = {name: value for name, value in media.items() if name in takes}
        if given:
            yield {**words, **given}
            yield {**given, "labels": words["labels"]}


def _merged(config: Any) -> dict[str, Any]:
    """What a config and those inside it say, the outermost first."""
    held: dict[str, Any] = {}
    for part in parts(config):
        held = {**vars(part), **held}
    return held


def _media(config: dict[str, Any]) -> Iterator[Inputs]:
    draw = torch.Generator().manual_seed(2)
    rows = len(text()["labels"])

    def noise(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=draw)

    side = config.get("image_size", _FRAMES)
    side = side if isinstance(side, int) else side[0]
    image = noise(config.get("num_channels", 3), side, side)
    zeros = torch.zeros_like(text()["input_ids"])
    patch = config.get("patch_embed_hidden_size", 768)
    extra = {
        "mm_token_type_ids": zeros,
        "qformer_input_ids": text()["input_ids"],
        "bbox": zeros[..., None].expand(-1, -1, 4),
        "flattened_patches": torch.cat([torch.ones(rows, 8, 2), noise(8, patch)], -1),
    }
    yield extra
    yield {**extra, "pixel_values": image}
    yield {**extra, "pixel_values": image[:, None]}
    bands = next((config[name] for name in _BANDS if name in config), 80)
    frames = 2 * config.get("max_source_positions", _FRAMES // 2)
    for sound in (noise(bands, frames), noise(frames, bands), noise(1280)):
        yield {"input_features": sound}
        yield {"input_values": sound}


def step(model: Any, inputs: Inputs, seed: int = 3) -> Step:
    """(loss, gradients by name) of one training step from zero gradients; the same dropout for the same seed."""
    from transformers import set_seed

    model.zero_grad()
    set_seed(seed)
    loss = model(**_copied(inputs)).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def _copied(inputs: Inputs) -> Inputs:
    """CTRL scales its inputs_embeds in place."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}


def plain_step(model: Any) -> tuple[Inputs, Step] | str:
    """The plainest inputs that a training step of the model runs on, and the step; or why it runs on none."""
    reason = ""
    for given in offers(model):
        try:
            return given, _second_step(model, given)
        except Exception as error:  # of the model's own code, about these inputs
            reason = reason or " ".join(f"{type(error).__name__}: {error}".split())[:120]
    return reason


def _second_step(model: Any, given: Inputs) -> Step:
    """Some models change at their first step, and some take no second."""
    step(model, given)
    return step(model, given)


def ways(model: Any, given: Inputs) -> Iterator[tuple[str, Inputs]]:
    """(name, inputs) of further steps, made of the plainest inputs; what users and trainers pass beside them."""
    labels = given["labels"]
    tokens = labels.shape[1]
    right = torch.ones_like(labels)
    right[-1, tokens - 3 :] = 0
    for name, mask in (("right padding", right), ("left padding", right.flip(1))):
        masked = labels.masked_fill(mask == 0, -100)
        yield name, {**given, "attention_mask": mask, "labels": masked}
    yield "num_items_in_batch", {**given, "num_items_in_batch": torch.tensor(11.0)}
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    yield "shift_labels", {**given, "shift_labels": shifted}
    if given.keys() == {"input_ids", "labels"}:
        positions = torch.arange(tokens) % (tokens // 2)
        yield "packed position_ids", {**given, "position_ids": positions.expand_as(labels)}
        embedded = model.get_input_embeddings()(given["input_ids"]).detach()
        yield "inputs_embeds", {"labels": labels, "inputs_embeds": embedded}


def step_as_shipped(model: Any, given: Inputs) -> Step | None:
    """The second step, or None if the model does not take these inputs, once or twice, or loses itself in them."""
    try:
        found = _second_step(model, given)
    except Exception:  # of the model's own code, about these inputs
        return None
    return found if found[0].isfinite() else None


def evaluation_difference(model: Any, given: Inputs) -> float | None:
    """The largest relative difference of loss and logits in evaluation, patched against plain; None if there is none
    as shipped.
    """
    from liger_kernel.transformers.patch import patched

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            found = model(**_copied(given))
        values = (found.loss, getattr(found, "logits", None))
        return [value for value in values if isinstance(value, Tensor)]

    model.eval()
    try:
        try:
            plain = outputs()
        except Exception:  # of the model's own code
            return None
        with patched(model):
            pairs = zip(outputs(), plain, strict=True)
            return max(float((x - y).norm() / y.norm()) for x, y in pairs)
    finally:
        model.train()


def differences(model: Any, given: Inputs, plain: Step) -> tuple[float, float, bool]:
    """(difference of the loss, largest difference of a gradient, whether logits were built), patched against plain.

    All relative: a gradient to its norm, plus `_FLOOR` of the largest norm of the model.
    """
    from liger_kernel.transformers.patch import patched

    loss, gradients = plain
    with patched(model), _promises_kept() as kept:
        new_loss, new = step(model, given)
    off = float(abs(new_loss - loss) / abs(loss))
    if new.keys() != gradients.keys():
        return off, float("inf"), not kept()
    floor = _FLOOR * max(float(g.norm()) for g in gradients.values())
    errors = [float((new[n] - g).norm()) / (float(g.norm()) + floor) for n, g in gradients.items()]
    return off, max(errors), not kept()


@contextlib.contextmanager
def _promises_kept() -> Iterator[Callable[[], bool]]:
    """Within, whether no promise of logits had to be turned into logits."""
    from liger_kernel.transformers.patch.promise import LogitsPromise

    original, broken = LogitsPromise.tensor, []

    def tensor(self: Any, why: str | None = None) -> Tensor:
        broken.append(why)
        return original(self, why)

    LogitsPromise.tensor = tensor
    try:
        yield lambda: not broken
    finally:
        LogitsPromise.tensor = original
