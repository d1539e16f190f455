"""One boot of the stand-in: the phases of SGLang in order, told and lived through by a prediction and its gates.

It knows argv, config.json, rig and release. What is claimed of it never reaches it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final

from ..facts.gpu import Rig
from ..predict.values import Prediction
from . import failures
from .argv import Given
from .effects import without_rule
from .gates import Fired, Scene, fired
from .info import arguments, context_of, requests_of, server_info
from .log import Log, Rank, ranks_of
from .memory import note
from .model import ModelFacts, read_model
from .numbers import Steps, last_allocation, size, steps_of
from .order import Order
from .release import Release
from .scene import box_of, linked

#: How long each phase takes: long enough to be seen in order, short enough to rehearse a suite in seconds.
PAUSE_S: Final = 0.015
_GIB: Final = 1 << 30
_NAMED: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b")
_SPELT: Final[Mapping[str, str]] = {"fp8_e4m3": "torch.float8_e4m3fn", "fp8_e5m2": "torch.float8_e5m2"}


class Boot:
    """The phases of one boot, in order. Each step prints what the release prints, and holds what it would hold."""

    def __init__(
        self,
        order: Order,
        rig: Rig,
        release: Release,
        given: Given,
        prediction: Prediction,
        packages: frozenset[str],
    ) -> None:
        self._order = order
        self._rig = rig
        self._given = given
        self._release = release
        self._prediction = prediction
        self._ranks = ranks_of(prediction.layout)
        self._log = Log(release, prediction.layout, self._ranks)
        self._model: ModelFacts = read_model(order.folder)
        self._box = box_of(rig, order.gpus)
        self._steps: dict[Rank, Steps] = steps_of(prediction, self._box, self._ranks)
        self._fullest = max(self._ranks, key=lambda rank: self._steps[rank].weights)
        self._backend = self._attention()
        scene = self._scene(packages)
        self._gates = fired(release, scene)
        self._no_rules = without_rule(order, scene.given, self._gates, prediction.assumptions)

    def run(self) -> None:
        """Everything, up to the end that SIGTERM asks for."""
        self._start()
        self._init()
        self._load()
        self._pool()
        self._capture()
        self._serve()

    # ------------------------------------------------------------------------------------------------------- phases

    def _start(self) -> None:
        log, prediction = self._log, self._prediction
        for one in (gate for gate in self._gates if gate.rule.phase == "argparse"):
            failures.refused(log, self._words(one))
        for what in self._no_rules:
            log.no_rule(what)
        if "--ssl-certfile" in self._given.words:
            log.own("it speaks no https, so it ends here")
            raise SystemExit(1)
        for assumption in prediction.assumptions:
            log.own(f"assumed: {assumption}")
        self._fields = arguments(self._order, self._release, self._given, prediction, self._backend)
        refusal = next((one for one in prediction.rejections if one.phase == "args"), None)
        if refusal is None:
            self._meet("args")
            shown = ", ".join(f"{name}={value!r}" for name, value in self._fields.items())
            log.say("args", fields=shown, dict=repr(self._fields))
        else:
            failures.rejected(log, _exception(refusal.text))
        if self._backend is not None:
            log.say("attention", backend=self._backend)
        if prediction.gpus_used > len(self._order.gpus):
            failures.died(log, self._ranks[0], "init", "RuntimeError: CUDA error: invalid device ordinal")

    def _init(self) -> None:
        log = self._log
        log.say("dist.begin")
        self._reject("init")
        self._meet("init")
        self._hold(lambda step: step.whole - step.before)
        log.say("dist.end", self._values(lambda step: {"usage": step.whole - step.before}), elapsed=PAUSE_S)
        log.say("dist.baseline", self._values(lambda step: {"usage": step.whole - step.before}))
        log.say("weights.begin", self._values(lambda step: {"avail": step.before}))

    def _load(self) -> None:
        log, prediction = self._log, self._prediction
        self._reject("weights")
        self._meet("weights")
        if prediction.verdict == "oom.weights":
            step = self._steps[self._fullest]
            each, free = last_allocation(step, self._model.layers)
            self._hold(lambda one: one.whole - min(free, one.before))
            failures.died(log, self._fullest, "weights", self._out_of_memory(each, free, step))
        self._hold(lambda step: step.whole - step.after)
        quant = f"quant={self._model.quant}, " if self._model.quant else ""
        log.say(
            "weights.end",
            self._values(lambda step: {"avail": step.after, "usage": step.weights}),
            elapsed=PAUSE_S,
            model_class=self._model.architecture,
            dtype=self._model.dtype,
            quant=quant,
        )

    def _pool(self) -> None:
        log, prediction = self._log, self._prediction
        self._reject("kv_pool")
        if prediction.verdict == "oom.kv_pool":
            f_min = prediction.f_min or 0.0
            words = {"fraction": prediction.mem_fraction_static, "suggested": f_min + 0.001, "f_min": f_min}
            failures.died(log, self._fullest, "kv_pool", log.text("no_pool", **words))
        tokens = prediction.kv_tokens or 0
        asked = self._given.values.get("max_total_tokens")
        if isinstance(asked, int) and asked > tokens:
            log.say("kv.clipped", asked=asked, tokens=tokens)
        kv = prediction.kv_gib or 0.0
        dtype = _SPELT.get(str(self._fields.get("kv_cache_dtype")), self._model.dtype)
        log.say("kv.dtype", kv_dtype=dtype)
        self._hold(lambda step: step.whole - step.with_pool)
        if self._model.latent:
            log.say("kv.one", kv_dtype=dtype, tokens=tokens, size=kv)
        else:
            log.say("kv.pair", kv_dtype=dtype, tokens=tokens, half=kv / 2)
        log.say("kv.end", self._values(lambda step: {"avail": step.with_pool}))
        self._meet("kv_pool")

    def _capture(self) -> None:
        log = self._log
        captures = not self._fields.get("disable_cuda_graph") and self._steps[self._fullest].graph > 0
        crash = next((one for one in self._gates if one.rule.phase == "graph_capture"), None)
        if not captures:
            if crash is not None:
                failures.died(log, self._ranks[0], "warmup", f"{crash.rule.raises}: {self._words(crash)}")
            return
        log.say("graph.begin", self._values(lambda step: {"avail": step.with_pool}))
        largest = self._prediction.resolved.get("cuda_graph_max_bs")
        sizes = _sizes(int(largest)) if largest else []
        if sizes:
            log.say("graph.sizes", sizes=sizes)
        self._reject("graph_capture")
        why = self._words(crash) if crash is not None else None
        if why is None and self._prediction.verdict == "oom.graph_capture":
            step = self._steps[self._fullest]
            free = max(0.0, step.with_pool)
            self._hold(lambda one: one.whole - free)
            why = self._out_of_memory(step.graph, free, step).removeprefix("torch.OutOfMemoryError: ")
        if why is not None:
            advice = log.text("graph.advice")
            failures.died(log, self._fullest, "graph_capture", f"Exception: Capture cuda graph failed: {why}\n{advice}")
        self._hold(lambda step: step.whole - step.end)
        log.say(
            "graph.end",
            self._values(lambda step: {"avail": step.end, "usage": step.graph}),
            elapsed=PAUSE_S,
            sizes=sizes,
        )

    def _serve(self) -> None:
        from .server import Serving, expect_the_end, start, wait_for_the_end

        log, prediction, fields = self._log, self._prediction, self._fields
        step = self._steps[self._fullest]
        log.say(
            "summary",
            tokens=prediction.kv_tokens or 0,
            chunk=fields.get("chunked_prefill_size"),
            prefill=fields.get("max_prefill_tokens") or 16384,
            requests=requests_of(prediction, self._model),
            context=context_of(prediction, self._model),
            avail=step.end,
        )
        layout = prediction.layout
        serving = Serving(
            release=self._release,
            info=server_info(self._release, fields, prediction, step, self._model, layout.dp),
            name=str(fields["served_model_name"]),
            path=str(fields["model_path"]),
            architecture=self._model.architecture,
            context=context_of(prediction, self._model),
            api_key=self._given.words.get("--api-key"),
            metrics="--enable-metrics" in self._given.words,
        )
        host, port = str(fields.get("host")), int(fields.get("port") or 30000)
        try:
            server = start(serving, host, port)
        except OSError as error:
            log.line(
                f"ERROR:    [Errno {error.errno}] error while attempting to bind on address ('{host}', {port}): "
                f"{(error.strerror or '').lower()}"
            )
            raise SystemExit(1) from None
        log.say("http.up", host=host, port=port)
        self._meet("warmup")
        over = expect_the_end()  # who reads the ready line may stop it at once
        serving.ready = True
        log.say("ready")
        wait_for_the_end(over, log, server)

    # -------------------------------------------------------------------------------------------------------- parts

    def _scene(self, packages: frozenset[str]) -> Scene:
        layout = self._prediction.layout
        capability = self._rig.gpus[self._order.gpus[0]].compute_capability
        return Scene(
            given=self._given.words,
            env=self._order.env,
            model=self._model.architecture,
            major=capability[0] if capability is not None else None,
            linked=linked(self._rig, self._order.gpus[: max(layout.gpus, 1)]),
            tp=layout.tp,
            packages=packages,
        )

    def _attention(self) -> str | None:
        """The attention backend that this release takes here by itself, where that was read; None where it is asked."""
        asked = any(name.endswith("attention-backend") for name in self._given.words)
        if asked or not self._model.plain or "--speculative-algorithm" in self._given.words:
            return None
        capability = self._rig.gpus[self._order.gpus[0]].compute_capability
        return self._release.backends.get((self._model.latent, capability[0])) if capability is not None else None

    def _meet(self, phase: str) -> None:
        """Do what the gates of a phase do: say their line, or fail with it."""
        for one in (gate for gate in self._gates if gate.rule.phase == phase):
            rule = one.rule
            if rule.behaviour in ("rejected", "crashes"):
                exception = f"{rule.raises}: {self._words(one)}"
                if phase == "args":
                    failures.rejected(self._log, exception)
                failures.died(self._log, self._ranks[0], phase, exception)
            elif rule.behaviour != "silent":
                numbers = {rank: {"rank": rank.tp} for rank in self._ranks}
                self._log.by(rule.by, rule.says, numbers, **self._names(one))

    def _reject(self, phase: str) -> None:
        """Fail with what the predictor says that this phase refuses."""
        for one in self._prediction.rejections:
            if one.phase == phase:
                failures.died(self._log, self._ranks[0], phase, _exception(one.text))

    def _words(self, one: Fired) -> str:
        return one.rule.says.format(**self._names(one)) if "{" in one.rule.says else one.rule.says

    def _names(self, one: Fired) -> dict[str, Any]:
        capability = self._rig.gpus[self._order.gpus[0]].compute_capability
        return {
            "major": capability[0] if capability is not None else "",
            "ranks": self._prediction.layout.tp,
            "value": one.value,
        }

    def _values(self, of: Any) -> dict[Rank, dict[str, Any]]:
        return {rank: of(self._steps[rank]) for rank in self._ranks}

    def _hold(self, used: Any) -> None:
        """Note what every GPU holds by now, then take the time that a phase takes."""
        found: dict[str, int] = {}
        for rank in self._ranks:
            uuid = self._rig.gpus[self._order.gpus[rank.gpu]].uuid
            found[uuid] = round(max(0.0, used(self._steps[rank])) * _GIB)
        note(self._order.memory, found)
        time.sleep(PAUSE_S)

    def _out_of_memory(self, tried: float, free: float, step: Steps) -> str:
        return self._log.text(
            "out_of_memory",
            tried=size(tried),
            gpu=self._fullest.gpu,
            total=size(step.whole),
            free=size(free),
            used=size(step.whole - free),
        )


def _sizes(largest: int) -> list[int]:
    """The batch sizes that are captured (sglang/srt/server_args.py, without speculation)."""
    steps = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *range(512, largest + 1, 32)]
    sizes = [one for one in steps if one <= largest]
    return sizes if largest in sizes else [*sizes, largest]


def _exception(text: str) -> str:
    """A refusal as a traceback ends: with the exception's name where the text has none."""
    if "CUDA error" in text:
        return f"RuntimeError: {text[text.index('CUDA error') :]}"
    return text if _NAMED.match(text) else f"ValueError: {text}"
