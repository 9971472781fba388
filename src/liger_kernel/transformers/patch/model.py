"""Patch one model instance, or the classes of a model type."""

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import nn

from liger_kernel.transformers.patch import adapters, hooks, rematerialise, seams
from liger_kernel.transformers.patch import head as heads
from liger_kernel.transformers.patch.apply import made_by, seam_of
from liger_kernel.transformers.patch.loss import causal_lm_loss
from liger_kernel.transformers.patch.report import ALREADY, FITS, LEFT, SWAPPED, Report

_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
_UNCLAIMED = (None, "rematerialise", adapters.SEAM)  # whose forwards may be wrapped (again)
_HEADED = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


# One model


def patch_instance(model: Any, flags: dict[str, bool], bind: bool) -> Report:
    """Every seam of one model; on an error everything done so far is put back."""
    model = unwrapped(model)
    report = Report(type(model).__name__)
    try:
        sites, spaces = seams.of_instance(model)
        seams.patch_modules(sites, flags, report, bind)
        if flags.get("rope"):
            seams.patch_rope(spaces, model, report, bind)
        if flags.get("cross_entropy"):
            _bind_loss(model, report, bind)
        look = adapters.Watch(report).on(model) if bind and flags.get(adapters.FLAG) else None
        if flags.get("fused_linear_cross_entropy"):
            _bind_head(model, report, bind, look)
        if adapters.watches(getattr(model, _forward_name(model), None)):
            look = None
        _bind_hooks(model, bool(flags.get("rematerialise")), report, bind, look)
    except BaseException:
        report.undo()
        raise
    return report


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside compile, DDP and PEFT wrappers."""
    while True:
        if "_orig_mod" in getattr(model, "_modules", ()):
            model = model._orig_mod
        elif type(model).__name__ in _PARALLEL:
            model = model.module
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def empty_model(config: Any) -> nn.Module:
    """The model of a config, on the meta device: no memory."""
    import transformers

    names = list(getattr(config, "architectures", None) or ())
    with torch.device("meta"):
        for name in names:
            if hasattr(transformers, name):
                return getattr(transformers, name)(config)
        automatic: list[Any] = [
            transformers.AutoModelForCausalLM,
            transformers.AutoModelForImageTextToText,
            transformers.AutoModelForSeq2SeqLM,
        ]
        for auto in automatic:
            if type(config) in auto._model_mapping:
                return auto.from_config(config)
        headless: Any = transformers.AutoModel
        return headless.from_config(config)


def _bind_head(model: Any, report: Report, bind: bool, look: adapters.Look | None) -> None:
    label = type(model).__name__
    outer, head = heads.find_head(model)
    reason = heads.why_not(outer, head)
    if reason is None and not heads.takes_labels(model.forward):
        reason = "forward takes no labels"
    if reason is not None:
        report.add("head", label, LEFT, reason)
        return
    detail = "loss from hidden states" + (" (tied)" if _tied(model, head) else "")
    at = _forward_name(model)
    already = seam_of(getattr(model, at)) == "head"
    if bind:
        heads.prepare(head, report.ledger)
        if not already:
            new = heads.wrapped_forward(_unbound(model, at), look)
            report.ledger.bind(model, at, adapters.watching(new, look), "head")
    report.add("head", label, ALREADY if already else SWAPPED if bind else FITS, detail)


def _bind_hooks(
    model: Any, rebuild: bool, report: Report, bind: bool, look: adapters.Look | None
) -> None:
    """The forwards of the model's parts: activations to rebuild, adapters to look out for."""
    rebuild = rebuild and _rebuilds(model, report)
    for name, place in hooks.places(model):
        at = _forward_name(place)
        present, old, new = getattr(place, at), _unbound(place, at), None
        if seam_of(present) not in _UNCLAIMED:  # a norm, an MLP or an adapted layer by itself
            continue
        already = made_by(present, "rematerialise")
        if rebuild and bind and not already:
            new = hooks.wrapped_forward(old, name, report, look)
        elif look is not None and not adapters.watches(present):
            new = adapters.wrapped_forward(old, look)
        if new is not None:
            report.ledger.bind(place, at, adapters.watching(new, look), seam_of(new))
        if rebuild:
            status = ALREADY if already else SWAPPED if bind else FITS
            detail = "inputs of linear layers are rebuilt in backward"
            report.add("rematerialise", type(place).__name__, status, detail)
            if bind and not already:
                _bind_layers(place, report)


def _bind_layers(place: Any, report: Report) -> None:
    """The layers that may be checkpointed."""
    for layer in hooks.layers(place):
        at = _forward_name(layer)
        if seam_of(getattr(layer, at)) is None:  # not a norm or an MLP in a list of its own
            new = hooks.wrapped_forward(_unbound(layer, at), None, report)
            report.ledger.bind(layer, at, new, "rematerialise")


def _rebuilds(model: Any, report: Report) -> bool:
    """Whether something can be rebuilt; says why not."""
    found = sum(report.count(seam, SWAPPED, ALREADY, FITS) for seam in rematerialise.SEAMS)
    reason = rematerialise.WHY_NOT if found else "it has no output that can be rebuilt"
    if reason is not None:
        report.add("rematerialise", type(model).__name__, LEFT, reason)
    return reason is None


def _forward_name(module: Any) -> str:
    """Where a module keeps its own forward: accelerate's hooks have moved it, and handle what it returns."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def _unbound(model: Any, name: str) -> Any:
    """The model's present forward as a function of self: its class's, or what another library put there."""
    mine = vars(model).get(name)
    if mine is None:
        return type(model).forward

    @functools.wraps(mine)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mine(*args, **kwargs)

    return forward


def _tied(model: Any, head: Any) -> bool:
    try:
        embeddings = model.get_input_embeddings()
    except (
        AttributeError,
        NotImplementedError,
    ):  # transformers' own: it finds none in some image models
        return False
    return getattr(embeddings, "weight", None) is head.weight


def _bind_loss(model: Any, report: Report, bind: bool) -> None:
    label = type(model).__name__
    present = getattr(model, "loss_function", None)
    if present is causal_lm_loss:
        report.add("cross_entropy", label, ALREADY)
    elif getattr(present, "__name__", None) != "ForCausalLMLoss":
        report.add(
            "cross_entropy", label, LEFT, "its loss_function is not the causal language model loss"
        )
    elif not bind:
        report.add("cross_entropy", label, FITS)
    else:
        # `_loss_function` is where the official setter stores it.
        report.ledger.put(model, "_loss_function", causal_lm_loss, "cross_entropy")
        report.add("cross_entropy", label, SWAPPED)


# The classes of a model type


def patch_type(model_type: str, flags: dict[str, bool]) -> Report:
    """Change the classes of a model type in place: acts on models that exist and on those to come.

    Without an instance there is no config: an example of each class is made from the default config,
    and the probe asks whether the answer holds for every other config (`probe.twin`). Each call
    checks that its instance has the activation that was probed.
    """
    report = Report(f"the classes of {model_type}")
    spaces, configs = modelling(model_type)
    if not spaces:
        report.add("model", model_type, LEFT, "this version of transformers does not know it")
        return report
    try:
        seams.patch_modules(seams.of_classes(spaces, configs), flags, report, bind=True)
        if flags.get("layer_norm"):
            seams.note_torchs_layer_norms(spaces, report)
        if flags.get("rope"):
            for space in spaces:
                seams.patch_rope([space], space, report, bind=True)
        look = adapters.Watch(report).look if flags.get(adapters.FLAG) else None
        for cls in headed_classes(spaces[0]):
            if flags.get("cross_entropy"):
                _bind_class_loss(cls, report)
            if flags.get("fused_linear_cross_entropy"):
                _bind_class_head(cls, report, look)
        if flags.get("rematerialise"):
            report.add("rematerialise", model_type, LEFT, "it acts on a model; give one")
    except BaseException:
        report.undo()
        raise
    return report


def modelling(model_type: str) -> tuple[list[ModuleType], list[Any]]:
    """(modelling files, default configs) of a type: its own first, then those of its text and vision parts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return [], []
    config = CONFIG_MAPPING[model_type]()
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    configs = [config, *(part for part in parts if part is not None)]
    names = dict.fromkeys(
        type(c).__module__.replace(".configuration_", ".modeling_") for c in configs
    )
    return [importlib.import_module(name) for name in names], configs


def headed_classes(space: ModuleType) -> list[type]:
    """Model classes of a modelling file that compute a loss over a vocabulary."""
    classes: list[Any] = seams.module_classes(space)
    return [c for c in classes if c.__name__.endswith(_HEADED) and heads.takes_labels(c.forward)]


def _bind_class_head(cls: Any, report: Report, look: adapters.Look | None) -> None:
    new = seam_of(cls.forward) != "head"
    if new:
        forward = adapters.watching(heads.wrapped_forward(cls.forward, look), look)
        report.ledger.bind(cls, "forward", forward, "head")
    report.add("head", cls.__name__, SWAPPED if new else ALREADY, "loss from hidden states")


def _bind_class_loss(cls: Any, report: Report) -> None:
    present = getattr(cls, "loss_function", None)
    if not isinstance(present, property):
        report.add("cross_entropy", cls.__name__, LEFT, "it has no loss_function property")
        return
    if seam_of(present.fget) == "cross_entropy":
        report.add("cross_entropy", cls.__name__, ALREADY)
        return

    def loss_function(self: Any) -> Any:
        found = present.fget(self)  # type: ignore[misc]
        return causal_lm_loss if getattr(found, "__name__", None) == "ForCausalLMLoss" else found

    loss_function.__liger_seam__ = "cross_entropy"  # type: ignore[attr-defined]
    report.ledger.put(cls, "loss_function", property(loss_function, present.fset), "cross_entropy")
    report.add("cross_entropy", cls.__name__, SWAPPED)
