"""A plan as calls of HyperParallel 1.0, of those that MindFormers 2.0 makes itself.

First as data (`calls`, made by `program`), which can be printed, compared and checked against signatures, then executed
(`execute`), then training by them (`trainer`), on modules that own parameters (`model`, `layer`, `modules`). Nothing
here imports HyperParallel before a program is executed or checked.
"""
