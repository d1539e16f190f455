"""Start-up hook of the CPU stack's own environment: lets `python -m sglang.launch_server --device cpu` work as is.

`gpuguard_cpu_stack.pth` imports this module whenever that environment's Python starts, so it must stay cheap, import
nothing heavy, and never change a setting that the caller has made.
"""

import os
import sys


class _DeclareTorchvisionOps:
    """Declares the two operators that torchvision's Python layer insists on, just before torchvision is first imported.

    PyPI's torchvision is built for CUDA: its extension library does not load beside a CPU build of torch, and
    torchvision then stops at the missing operator `torchvision::nms`. SGLang imports torchvision, and calls neither
    operator for a text model. They are declared without an implementation, so a call would still fail loudly.
    """

    _signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

    def find_spec(self, name, path=None, target=None):
        """Answer None always (this finder finds nothing); on the first `torchvision`, declare the operators."""
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # the declarations live as long as this object
            for operator in ("nms", "qnms"):
                self.library.define(operator + self._signature)
            _keep_alive.append(self)
        return None


_keep_alive = []

# Without it SGLang imports vLLM's CUDA operators even under `--device cpu`.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
sys.meta_path.insert(0, _DeclareTorchvisionOps())
