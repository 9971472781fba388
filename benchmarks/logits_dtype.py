"""How far each `logits_dtype` is from float64, on a trained model's hidden states and on random ones.

    python benchmarks/logits_dtype.py [--tokens 512]

SmolLM2-135M-Instruct on the source of a file of the standard library, hidden states and head rounded to bf16; and
normal random numbers of the same shapes. Errors of the per-token log-probabilities, and of the gradients of their mean.
"""

import argparse
import inspect

import torch

from liger_kernel.ops.linear_logprob import linear_logprob
from liger_kernel.train.model import find

FORMS = {"None": None, "torch.float32": torch.float32, '"offset"': "offset"}


def trained(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states `[N, H]`, head `[V, H]`, targets `[N]`."""
    source = find(None)
    model, tokenizer = source.load(torch.float32, torch.device("cpu")), source.tokenizer()
    ids = tokenizer(inspect.getsource(argparse), return_tensors="pt").input_ids[:, : tokens + 1]
    with torch.no_grad():
        hidden = model.model(ids[:, :-1]).last_hidden_state[0]
    return hidden, model.get_output_embeddings().weight.detach(), ids[0, 1:]


def drawn(like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight, targets = like
    return torch.randn_like(hidden), 0.1 * torch.randn_like(weight), targets


def errors(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    leaves = [t.bfloat16().requires_grad_() for t in (hidden, weight)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    truth = (exact[0] @ exact[1].t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad(truth.mean(), exact)
    print("| logits_dtype | largest error of logp | mean | of the mean logp | dh, relative | dW |")
    print("|---|---|---|---|---|---|")
    for name, form in FORMS.items():
        logp = linear_logprob(*leaves, targets, logits_dtype=form, accum_dtype=torch.float32).logp
        found = torch.autograd.grad(logp.mean(), leaves)
        off = (logp.double() - truth).detach().abs()
        shares = [
            float((g.double() - w).norm() / w.norm()) for g, w in zip(found, wanted, strict=True)
        ]
        whole = float((logp.double() - truth).detach().mean().abs())
        print(
            f"| {name} | {off.max():.1e} | {off.mean():.1e} | {whole:.1e} | {shares[0]:.1e} | {shares[1]:.1e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    problem = trained(parser.parse_args().tokens)
    print("SmolLM2-135M")
    errors(*problem)
    print("random")
    errors(*drawn(problem))


if __name__ == "__main__":
    main()
