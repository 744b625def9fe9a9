"""Loading a model's weights and holding them in the precision that suits the device.

Owns the conversion and the order of evaluation. Must never know requests or budgets. Invariant: after load_weights()
every weight is in memory, evaluated on the calling thread (lazily loaded ones belong to the thread that first needs
them).
"""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from common.errors import ConfigError
from worker import device, sgemm
from worker.engines import mlx_lm_0_32
from worker.plan import FLOAT32

def load_weights(folder: Path, precision: str, progress: Callable[[str], None]) -> nn.Module:
    """The model, evaluated. Raises ConfigError for what mlx-lm cannot load."""
    try:
        model = mlx_lm_0_32.load(folder)
        if precision == FLOAT32:
            progress("converting the weights to float32")
            # First the scales, so that nothing is rounded to their half precision; then what had no float scales.
            model.set_dtype(mx.float32)
            model = mlx_lm_0_32.unpack_quantized(model)
            model.set_dtype(mx.float32)
        _evaluate(model)
        if device.backend() == device.CPU and not sgemm.in_use():
            _lay_out(model)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError, ImportError) as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(f"mlx-lm cannot load {folder}: {type(error).__name__}: {text}") from error
    device.clear_cache()
    return model


def _lay_out(model: nn.Module) -> None:
    """Put the float32 matrices down column by column: OpenBLAS multiplies few rows by them in less time so. Our own
    library does not, and wants them as they are.

    Only how they lie in memory changes. An embedding takes part where the logits are made of it too.
    """
    named = model.named_modules()
    tied = not any(name.rpartition(".")[2] == "lm_head" for name, _ in named)
    for _, module in named:
        if type(module) is nn.Linear or (type(module) is nn.Embedding and tied):
            weight = module.weight
            if weight.dtype == mx.float32:
                del module.weight
                module.weight = mx.contiguous(weight.T).T
                mx.eval(module.weight)


def _evaluate(model: nn.Module) -> None:
    """One weight at a time, so that packed and unpacked copies do not lie side by side for the whole model."""
    for _, weight in tree_flatten(model.parameters()):
        mx.eval(weight)
