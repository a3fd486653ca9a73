"""The divergence lab: two runs of one draft model part somewhere; which module, which token, and why?

`capture` writes down what a run computed (a `Trace`); traces are compared without torch. A *set-up* is one way to run
the draft: alone, beside itself, beside a decoy twin, beside the target.
"""
