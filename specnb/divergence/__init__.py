"""Two runs of one draft part somewhere: which module, which token, and why? And is what was sampled what the rows say?

It knows modules, tensors and logs; it knows nothing of speed.

`investigate`  run the draft alone, beside itself, beside a decoy twin and beside the target (*set-ups*); replay each
               module on its own inputs; name the first that is wrong, the token, and the likely cause.
               The reference is the draft as it was loaded. Half precision is not reported. Permuted weights that
               leave the logits unchanged are DIVERGENT, with a note that they cannot cause rejections.
`--deploy module:function`  a context manager of yours under which the draft runs as it does where it fails.
`capture`      write down what each module was given and gave (a `Trace`), here or in a process of your own:

                   with capture(draft_module, "traces/beside-target", known={"target": target_module}):
                       run_the_engine()  # in this thread, eagerly; vLLM: enforce_eager=True, no multiprocessing

`compare`      judge two traces, without torch. `--sound` gives a sound run, which shows what rounding
               does; `--rename OLD=NEW` aligns the paths of two module trees.
`preflight`    check the drafter and the caches in seconds, before anything is traced.
`audit`        decode, and test that drafts and tokens follow their rows (`sampling`; notebook 08).
`audit-text`   feed what another engine wrote greedily through plain decoding: is it the target's own (`foreign`)?
`faults`       the injectable bugs and two harmless changes (controls), to try on a model of your own.

Exit codes are those of `git bisect run`: 0 sound, 1 divergent, 125 inconclusive.

    git bisect run specnb divergence investigate --draft ./draft --target ./target --deploy my_service:deploy

Captures see arguments, results, caches among the arguments, and parameters that torch's operations read. They do not
see what a Triton or C++ kernel looks up by itself; the coverage counts the parameters that nobody was seen to read.
"""
