"""Do these heads work? The measurement of notebook 05, section by section, into one record.

A section is a method: it measures, keeps what it found for the record, and returns it as a table. What a section
needs of an earlier one it says by name (the text that heads practise on, the gates' accuracies that choose a tree).
"""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from specnb.decode.generate import prompt_ids
from specnb.errors import InputError
from specnb.lm.load import load
from specnb.lm.tree import COMMITTED
from specnb.measure.experiment import Progress, silent
from specnb.measure.stats import FEWEST
from specnb.medusa import ablation as head_ablation
from specnb.medusa import bench as heads_bench
from specnb.medusa import curve as head_curve
from specnb.medusa import gates as head_gates
from specnb.medusa import planted as head_planted
from specnb.medusa.accuracy import NO_LABEL, Scores, accuracy_matrix, score, share_interval, trace
from specnb.medusa.bench import Drafting, rows_of
from specnb.medusa.gates import Checked
from specnb.medusa.heads import new_heads
from specnb.medusa.identity import identity
from specnb.medusa.load import accuracy_of
from specnb.medusa.practice import Watch, practise, survives_a_kill, write_text
from specnb.medusa.recipe import Recipe
from specnb.medusa.tree import TreePlan
from specnb.medusa.workbench import Workbench, loaded_heads

TOPS = (1, 5)
RESUMED, FRESH = "resumed", "from scratch"
BATCH = 128
"""Positions a step of the short trainings."""
FAULT_TOKENS = 24
"""At most, of the texts that planted faults are judged on: what they do shows soon."""
PROBE = 64
"""Tokens whose states are compared."""
RATE, RESUMED_RATE = 2e-3, 1e-4
"""Highest learning rates: that of the preset `cpu`, and one that trained heads are not thrown off by."""


class Study(Workbench):
    """The sections. Use as a context manager."""

    def write(self, progress: Progress = silent) -> pd.DataFrame:
        """Text by the backbone, made now. One row: what it holds, and the seconds it took."""
        p = self.params
        with self.keeping("text") as keep:
            found = write_text(
                p.target, self.work / "text", rows=p.rows, length=p.row_tokens, dtype=p.dtype, seed=p.seed,
                progress=progress,
            )  # fmt: skip
            return keep(pd.DataFrame([found]))

    def plant(self, progress: Progress = silent) -> pd.DataFrame:
        """The faults of the Medusa note on the Medusa heads: `head_planted.judge`, sound heads in the first row."""
        heads, report, backbone = self.heads["medusa"], self.reports["medusa"], self.backbone
        with self.keeping("faults") as keep, TemporaryDirectory(dir=self.work) as folder:
            progress(0, 1, "a schedule that dies")
            died = head_planted.rate_died(heads, backbone, self._recipe(RATE, teacher=0.0), self.text, Path(folder))
            cases = [
                head_planted.Planted("none", "", heads, report, head_curve.read(report.path)),
                head_planted.never_loaded(heads, backbone, self.params.seed),
                head_planted.other_norm(heads, backbone, report, twice=False),
                head_planted.other_norm(heads, backbone, report, twice=True),
                died,
            ]
            found, _ = head_planted.judge(
                self.target, cases, self.prompts[1][:FEWEST], seed=self.params.seed, progress=progress,
                max_new_tokens=min(FAULT_TOKENS, self.params.max_new_tokens),
            )  # fmt: skip
            self.measured["died"] = rows_of(pd.DataFrame(vars(died.curve)))
            return keep(found)

    @property
    def died(self) -> pd.DataFrame:
        """The log of the schedule that died, after `plant`: step, lr, loss. Raises InputError before."""
        if "died" not in self.measured:
            raise InputError("no schedule has died yet: call plant first")
        return pd.DataFrame(self.measured["died"])

    def last_hidden_state(self) -> pd.DataFrame:
        """Which state transformers' `hidden_states[-1]` is: `head_planted.last_hidden_state`."""
        with self.keeping("last_hidden_state") as keep:
            ids = prompt_ids(self.target, self.prompts[1][0])[:PROBE]
            return keep(head_planted.last_hidden_state(self.target, ids))

    def practise(self, watch: Watch | None = None) -> pd.DataFrame:
        """The Medusa heads go on for a few steps, and new ones begin; a row for each head and training."""
        shipped, backbone, seed = self.heads["medusa"], self.backbone, self.params.seed
        resumed = new_heads(shipped.config, backbone, shipped.token_map, seed)
        resumed.load_state_dict(shipped.state_dict())
        fresh = new_heads(shipped.config, backbone, shipped.token_map, seed)
        with self.keeping("practice") as keep, TemporaryDirectory(dir=self.work) as folder:
            runs = [
                practise(name, heads, self._recipe(rate), self.text, Path(folder) / name, watch=watch)
                for name, heads, rate in ((RESUMED, resumed, RESUMED_RATE), (FRESH, fresh, RATE))
            ]
            return keep(pd.DataFrame([row for run in runs for row in run.rows()]))

    def kill(self) -> pd.DataFrame:
        """A training that was killed and went on, against one that was not: `head_practice.survives_a_kill`."""
        shipped = self.heads["medusa"]
        with self.keeping("killed") as keep, TemporaryDirectory(dir=self.work) as folder:
            found = survives_a_kill(
                lambda: new_heads(shipped.config, self.backbone, shipped.token_map, self.params.seed), self.text,
                Path(folder), seed=self.params.seed,
            )  # fmt: skip
            return keep(found)

    def ablate(self, progress: Progress = silent) -> pd.DataFrame:
        """One part of the Medusa heads changed at a time: `head_ablation.run`."""
        shipped = self.heads["medusa"]
        recipe = self._recipe(RATE, steps=self.params.ablation_steps, teacher=0.0)
        with self.keeping("ablation") as keep:
            found = head_ablation.run(
                self.target, shipped.config, shipped.token_map, recipe, self.text, progress=progress
            )
            return keep(found)

    def gate(self, progress: Progress = silent) -> pd.DataFrame:
        """The gates on both sets of heads. A row for each gate: kind, gate, passed, says."""
        rows = []
        with self.keeping("gates") as keep:
            for kind, heads in self.heads.items():
                report = self.reports[kind]
                self.checked[kind] = found = head_gates.run(
                    self.target, heads, report, self.prompts[1], curve=head_curve.read(report.path),
                    max_new_tokens=self.params.max_new_tokens, seed=self.params.seed, progress=progress,
                )  # fmt: skip
                rows += [{"kind": kind, "gate": g.name, "passed": g.passed, "says": g.says} for g in found.gates]
            return keep(pd.DataFrame(rows))

    def accuracy(self) -> pd.DataFrame:
        """Of each head on the judged prompts, after `gate`: kind, head, top, accuracy, low, high, n."""
        with self.keeping("accuracy") as keep:
            found = [
                by_head([score(self.heads[kind], trace(self.target, g)) for g in checked.plain]).assign(kind=kind)
                for kind, checked in self._judged().items()
            ]
            return keep(pd.concat(found, ignore_index=True))

    def served(self) -> pd.DataFrame:
        """alpha by position of greedy chains, after `gate`: kind, position, alpha, low, high, kept, tested."""
        with self.keeping("served") as keep:
            found = [checked.served.assign(kind=kind) for kind, checked in self._judged().items()]
            return keep(pd.concat(found, ignore_index=True))

    def choose(self) -> pd.DataFrame:
        """The tree of each kind that pays here, after `gate`; a row for each size: nodes, depth, tokens, seconds."""
        with self.keeping("trees") as keep:
            for kind, checked in self._judged().items():
                self.drafting[kind] = heads_bench.choose_drafts(
                    self.target, self.heads[kind], checked, 0, self.bench, trained=accuracy_of(self.reports[kind].path)
                )
            found = pd.DataFrame([
                {"kind": kind, "nodes": len(c.plan), "depth": c.plan.depth, "tokens": c.tokens, "seconds": c.seconds}
                for kind, drafting in self.drafting.items() for c in drafting.candidates
            ])  # fmt: skip
            # nodes of no worth are left out, so that two sizes asked for may be one tree
            return keep(found.drop_duplicates(["kind", "nodes"]) if len(found) else found)

    def tree(self) -> pd.DataFrame:
        """The nodes of the chosen trees, after `choose`: kind, node, parent, head, rank, value, worth.

        `value` is how often that rank of that head is right, which is taken for how often it is given that the path
        before it is right; `worth` is the product along the path.
        """
        rows = []
        with self.keeping("tree") as keep:
            for kind, drafting in self._chosen().items():
                plan, table = drafting.plan or TreePlan.chain(drafting.k), accuracy_matrix(self.checked[kind].accuracy)
                worth = {COMMITTED: 1.0}
                for node, (parent, rank) in enumerate(zip(plan.parents, plan.ranks, strict=True)):
                    head = plan.tree.depths[node]
                    worth[node] = worth[parent] * table[head, rank]
                    rows.append({"kind": kind, "node": node, "parent": parent, "head": head, "rank": rank,
                                 "value": float(table[head, rank]), "worth": float(worth[node])})  # fmt: skip
            return keep(pd.DataFrame(rows))

    def time(self, progress: Progress = silent) -> pd.DataFrame:
        """Speeds of both kinds by category, after `choose`. Raises InputError where a gate failed: no speed then."""
        with self.keeping("speeds") as keep:
            found = []
            for kind, drafting in self._chosen().items():
                if not self.checked[kind].passed:
                    raise InputError(f"no speed of {kind} heads that failed a gate: {_why(self.checked[kind])}")
                found.append(heads_bench.time_prompts(
                    self.target, self.heads[kind], drafting, self.prompts[0], self.bench, progress
                ).assign(kind=kind))  # fmt: skip
            return keep(pd.concat(found, ignore_index=True))

    def compare_texts(self, progress: Progress = silent) -> pd.DataFrame:
        """Chains and the chosen trees against plain decoding in float32, after `choose`: `head_identity.identity`."""
        p = self.params
        of = {c: [prompt for prompt in self.prompts[0] if prompt.category == c] for c in p.categories}
        chosen = [prompt for found in of.values() for prompt in found[: p.identity_prompts]]
        with self.keeping("identity") as keep, ExitStack() as opened:
            target = load(p.target, backend="hf", dtype="float32")
            opened.callback(target.close)
            drafting = {
                kind: (loaded_heads(getattr(p, kind), kind, target)[0], chosen.plan)
                for kind, chosen in self._chosen().items()
            }
            found = identity(target, drafting, chosen, max_new_tokens=p.max_new_tokens, progress=progress)
            return keep(found)

    def _recipe(self, rate: float, *, steps: int = 0, teacher: float = 0.5) -> Recipe:
        steps = steps or self.params.steps
        return Recipe(
            steps, batch_size=BATCH, peak_lr=rate, warmup=max(1, steps // 10), teacher=teacher, seed=self.params.seed
        )

    def _judged(self) -> dict[str, Checked]:
        if not self.checked:
            raise InputError("nothing was judged yet: call gate first")
        return self.checked

    def _chosen(self) -> dict[str, Drafting]:
        if not self.drafting:
            raise InputError("no tree was chosen yet: call choose first")
        return self.drafting


def by_head(scores: list[Scores]) -> pd.DataFrame:
    """How often each head has the true token among its best `top`, with intervals over prompts."""
    rows = []
    for head in range(scores[0].rank.shape[1]):
        ranks = [one.rank[:, head][one.rank[:, head] != NO_LABEL] for one in scores]
        for top in TOPS:
            found = share_interval([((rank < top).sum(), len(rank)) for rank in ranks])
            rows.append({
                "head": head, "top": top, "accuracy": found.value, "low": found.low, "high": found.high,
                "n": sum(map(len, ranks)),
            })  # fmt: skip
    return pd.DataFrame(rows)


def _why(checked: Checked) -> str:
    return "; ".join(f"{d.name} ({d.evidence}): {d.remedy}" for d in checked.diagnoses) or "no known fault fits"
