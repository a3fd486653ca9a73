"""The experiment: generate plainly, follow drafters along the text, replay policies, run some live.

Because decoding is lossless, a text does not depend on the draft tokens. So each text is generated
once, plainly, and every drafter is followed along it (`measure.follow`). A replay then predicts
every draft length and every controller (`measure.replay`). Some run live, to check the predictions.

Notebooks 01, 02, 07 and 09 are this experiment. They take the same steps of `Sweep`, and differ in
what they replay and what they run live, here separated by a semicolon:

* 01: every K of every drafter; some K of the first drafter.
* 02: every controller and the router, on several machines; every controller.
* 07: every K of every drafter, and routers; the best K of every drafter, and routers.
* 09: the choices of its reader.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from specnb.errors import SpecnbError
from specnb.lm.base import LanguageModel
from specnb.measure.baseline import BaselineTimer
from specnb.measure.bench import rotate
from specnb.measure.cost import CURVE_REPEATS, Cost, crosses_engines, verify_costs
from specnb.measure.experiment import Experiment, Progress, silent
from specnb.measure.follow import follow, require_followed
from specnb.measure.intervals import FEWEST
from specnb.measure.recording import Recording
from specnb.measure.replay import counts_of, every_k, route, sweep_row
from specnb.prompts import Prompt
from specnb.records import Generation

Sampling = tuple[float, float]
"""Temperature and top_p."""
WARM_UP_TOKENS = 8
Methods = Callable[[float], Mapping[str, Mapping[str, Any]]]
"""Maps a temperature to settings of `specnb.generate` by name. It is called before each generation,
so that each can have a new controller."""


class Sweep(Experiment):
    """A running sweep. Its methods are the steps of the experiment, in their order."""

    params: Any
    target: LanguageModel

    def __init__(self, *args: Any) -> None:
        """Start a sweep, as an `Experiment`."""
        super().__init__(*args)
        self.measured = {"names": {}, "left_out": {}}
        self.routers: list[Any] = []
        self.timer: BaselineTimer | None = None
        self.costs: dict[str, Cost] = {}
        self.recordings: list[Recording] = []

    def open_models(self, required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """1. Open the target and the drafters. Leave out those of `optional` that do not fit.

        Routers among `optional` are replayed along the recordings of their arms. Raises what `load`
        and `load_drafter` do, and InputError for a drafter that cannot be followed.
        """
        engine = self.params.model_dump(include={"backend", "dtype"})
        if engine.get("backend") != "hf":
            engine.pop("dtype", None)  # llama.cpp has no such option
        self.open_target(
            self.params.target, **{name: value for name, value in engine.items() if value}
        )
        for name in (*required, *optional):
            try:
                drafter = self.open_drafter(name)
                if drafter.chooses_k and name in optional:
                    self.routers.append(drafter)
                else:
                    require_followed([*self.drafters, drafter])
                    self.drafters.append(drafter)
                self.measured["names"][drafter.name] = name
            except SpecnbError as error:
                if name in required:
                    raise
                self.measured["left_out"][name] = str(error)

    def time_forwards(self, k_max: int) -> None:
        """2. Time forward passes: T(n) of the target, c of each drafter, and the baseline.

        `run_live` continues to time the baseline.
        """
        repeats = CURVE_REPEATS[self.params.budget]
        curve, c = verify_costs(self.target, self.drafters, k_max, repeats=repeats)
        self.costs = {
            d.name: Cost(curve, c[d.name], of_target=d.model is None) for d in self.drafters
        }
        self.measured |= {
            "cs": c,
            "verify_curve": curve.model_dump(mode="json"),
            "c_across_engines": [d.name for d in self.drafters if crosses_engines(self.target, d)],
        }
        self.timer = self._opened.enter_context(BaselineTimer(self.target))
        for prompt in self.chosen[:FEWEST]:
            self.timer.time(prompt)
        self.measured["baseline"] = self.timer.baseline().model_dump()

    def generate_plainly(
        self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], progress: Progress
    ) -> None:
        """3. Generate every prompt plainly with every sampling."""
        steps = list(product(samplings, prompts))
        for done, ((temperature, top_p), prompt) in enumerate(steps):
            progress(done, len(steps), f"{prompt.id}, temperature {temperature:g}, plain")
            self.generations.append(self.decode(prompt, temperature=temperature, top_p=top_p))

    def follow_drafters(self, k_max: int, progress: Progress) -> None:
        """4. Follow every drafter along the plain texts, with up to `k_max` draft tokens."""
        texts = [generation for generation in self.generations if not generation.k]
        steps = list(product(self.drafters, texts))
        for done, (drafter, text) in enumerate(steps):
            progress(done, len(steps), f"following {drafter.name}")
            n = self.params.max_new_tokens
            self.recordings += follow(self.target, [drafter], text, k_max=k_max, max_new_tokens=n)

    def replay_every_k(self, ks: Sequence[int]) -> list[dict[str, Any]]:
        """5. Replay every K of every drafter, and the routers; return a row for each text.

        The rows are those of `replay.sweep_row`, with `live_plain_s`, the measured seconds of plain
        decoding. Routers choose K themselves, up to the largest of `ks`.
        """
        rows = []
        for recording in self.recordings:
            for k, counts in zip(ks, every_k(recording, ks), strict=True):
                rows.append(sweep_row(recording, k, counts, self.costs[recording.drafter]))
        for router in self.routers:
            rows += self._replay_router(router, max(ks))
        plain_s = {(g.prompt_id, g.temperature): g.decode_s for g in self.generations if not g.k}
        return [
            row | {"live_plain_s": plain_s[row["prompt_id"], row["temperature"]]} for row in rows
        ]

    def _replay_router(self, router: Any, k_max: int) -> Iterator[dict[str, Any]]:
        """Yield a row for each text; the texts of one temperature form one stream.

        Yields nothing if an arm is not one of the drafters.
        """
        arms = {arm.drafter.name: arm.drafter for arm in router.arms}
        if arms.keys() - self.costs.keys():
            return
        costs = {name: self.costs[name] for name in arms}
        expected = {name: arm.expected for name, arm in arms.items()}
        k_max = min(router.chooses_k, k_max)
        for temperature in dict.fromkeys(recording.temperature for recording in self.recordings):
            stream = [
                recording for recording in self.recordings if recording.temperature == temperature
            ]
            for text in route(stream, costs, k_max=k_max, expected=expected):
                first = text.recording
                row = sweep_row(first, k_max, counts_of(first, text.steps), costs[first.drafter])
                yield row | {"drafter": router.name, "seconds": sum(text.round_s)}

    def run_live(
        self,
        methods: Methods,
        prompts: Sequence[Prompt],
        samplings: Sequence[Sampling],
        progress: Progress = silent,
    ) -> None:
        """6. Run `methods` live, in rotating order, interleaved with plain decoding.

        Before the runs of each text, the baseline is timed, if `time_forwards` began with it.
        """
        # Warm up briefly, without controllers and routers: they learn from what they run.
        for drafter in (None, *self.drafters) if prompts else ():
            settings = {"drafter": drafter, "k": 1} if drafter else {}
            self.decode(prompts[0], max_new_tokens=WARM_UP_TOKENS, **settings)
        texts = list(product(prompts, samplings))
        names = ["", *methods(samplings[0][0])]
        order = rotate(names, len(texts))
        for done, (_, index, name) in enumerate(order):
            prompt, (temperature, top_p) = texts[index]
            if self.timer and not done % len(names):
                self.timer.time(prompt)
            progress(
                done,
                len(order),
                f"{prompt.id}, temperature {temperature:g}, live: {name or 'plain'}",
            )
            settings = methods(temperature)[name] if name else {}
            self.generations.append(
                self.decode(prompt, temperature=temperature, top_p=top_p, **settings)
            )
        if self.timer:
            self.measured["baseline"] = self.timer.baseline().model_dump()


def plain_text_of(generations: Sequence[Generation], generation: Generation) -> Generation:
    """Return the first plain generation of the same prompt and temperature."""
    text = (generation.prompt_id, generation.temperature)
    return next(g for g in generations if not g.k and (g.prompt_id, g.temperature) == text)
