"""Find where two runs of a draft model diverge (module, token, cause), and audit sampled output.

This package handles modules, tensors and logs, not speed.

`investigate`  Run the draft alone, next to a copy of itself, a decoy twin and the target
               (*setups*), and replay each module on its recorded inputs. Report the first wrong
               module, the first wrong token and the likely cause. The reference is the draft as
               loaded. A service that computes in lower precision is not judged: load the draft in
               that dtype. Permuted weights that leave the logits unchanged are DIVERGENT, with a
               note that they cannot cause rejections.
`--deploy module:function`  Your context manager that runs the draft as the failing service does.
`capture`      Record the inputs and outputs of each module (a `ModuleTrace`) in any process:

                   with capture(draft, "traces/beside-target", known={"target": target}):
                       run_the_engine()  # eagerly, in this thread
                       # vLLM: enforce_eager=True, no multiprocessing

`compare`      Judge two traces, without torch. `--sound` adds a correct run, which shows the size
               of rounding errors. `--rename OLD=NEW` aligns the paths of two module trees.
`audit`        Decode (`lossless`), and test that draft and output tokens follow their
               distributions (`sampling`).
`audit-text`   Check whether another engine's greedy text is the target's own (`foreign`).
`faults`       List six planted faults and two harmless changes (controls) to try on your model.

Exit codes are those of `git bisect run`: 0 sound, 1 divergent, 125 inconclusive.

    git bisect run specnb divergence investigate --draft ./draft --target ./target \\
        --deploy service:deploy

A capture sees arguments, results, caches among the arguments, and parameters that torch operations
read. It does not see what a Triton or C++ kernel looks up by itself. The coverage states how many
parameters were seen to be read.
"""
