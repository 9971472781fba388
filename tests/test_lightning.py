"""A patched model in Lightning's training loop: the losses of the model as it is shipped."""

import pytest
import torch
from models import batch, tiny

import liger_kernel

lightning = pytest.importorskip(
    "lightning", reason="Lightning is not installed; make test-lightning installs it"
)
pytestmark = [
    pytest.mark.plain,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning: few workers, no validation
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, rows, _):
        outputs = self.model(**rows)
        self.losses.append(outputs.loss.detach())
        return outputs.loss

    def validation_step(self, rows, _):
        self.log("eval", self.model(**rows, skip_logits=True).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(seeds):
    return torch.utils.data.DataLoader([batch(seed) for seed in seeds], batch_size=None)


def losses(model, precision):
    trainer = lightning.Trainer(
        accelerator="cpu", precision=precision, max_epochs=1, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module(model)
    trainer.fit(module, loader(range(6)), loader([7]))
    return torch.stack([*module.losses, trainer.callback_metrics["eval"]])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_same_losses(precision):
    model = tiny("llama")
    wanted = losses(tiny("llama"), precision)
    with liger_kernel.patched(model) as report:
        found = losses(model, precision)
    assert report.rebuilt["model"] > 0
    close = 1e-4 if precision == "32-true" else 2e-2
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=close, atol=0.0)
    assert wanted[-1] < wanted[0]
