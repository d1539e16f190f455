"""A stand-in for SGLang's compiled kernel library, which exists only for CUDA.

Every name can be imported and none can be called: a call raises NotImplementedError. SGLang serves a plain bf16 model
with torch code alone when it finds no AMX backend, so it only ever imports these names. What it looks for to take the
AMX path is a torch operator that the real library registers; this one registers none, on any CPU.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.0.0+stub"


class _Kernel:
    """A name that exists and cannot be called."""

    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__}: sgl_kernel is a stand-in, it has no compiled kernels")

    def __getattr__(self, name):
        return _lookup(self.__name__, name)

    def __repr__(self):
        return f"<stand-in for {self.__name__}>"


def _lookup(owner, name):
    # Dunders are how Python asks what an object can do: the honest answer is "nothing".
    if name.startswith("__"):
        raise AttributeError(f"{owner} (a stand-in) has no {name}")
    return _Kernel(f"{owner}.{name}")


def __getattr__(name):
    return _lookup(__name__, name)


class _Submodules:
    """Finds every `sgl_kernel.<anything>` as a module of the same kind."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return ModuleType(spec.name, doc=__doc__)

    def exec_module(self, module):
        module.__getattr__ = lambda name: _lookup(module.__name__, name)


sys.meta_path.append(_Submodules())
