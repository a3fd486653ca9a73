"""Find where two runs of one draft diverge (module, token, cause), and audit sampled output.

This room knows modules, tensors and logs; it knows nothing about speed.

`investigate`  run the draft alone, next to itself, to a decoy twin and to the target (*set-ups*), and
               replay each module on its own inputs. Names the first wrong module, the token and the
               likely cause. The reference is the draft as loaded. A service that computes in a coarser
               type is not judged: load the draft in that type. Permuted weights that leave the logits
               unchanged are DIVERGENT, with a note that they cannot cause rejections.
`--deploy module:function`  your context manager that runs the draft as in the failing service.
`capture`      record the inputs and outputs of each module (a `Trace`), here or in another process:

                   with capture(draft_module, "traces/beside-target", known={"target": target_module}):
                       run_the_engine()  # in this thread, eagerly; vLLM: enforce_eager=True, no multiprocessing

`compare`      judge two traces, without torch. `--sound` gives a correct run, which shows the size of
               rounding; `--rename OLD=NEW` aligns the paths of two module trees.
`audit`        decode (`lossless`), and test that draft and output tokens follow their rows (`sampling`).
`audit-text`   feed another engine's greedy text through plain decoding: is it the target's own (`foreign`)?
`faults`       six planted faults and two harmless changes (controls), to try on a model of your own.

Exit codes are those of `git bisect run`: 0 sound, 1 divergent, 125 inconclusive.

    git bisect run specnb divergence investigate --draft ./draft --target ./target --deploy
    my_service:deploy

A capture sees arguments, results, caches among the arguments, and parameters that torch operations
read. It does not see what a Triton or C++ kernel looks up by itself; the coverage counts the
parameters without an observed read.
"""
