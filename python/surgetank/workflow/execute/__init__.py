"""The local executor (`surgetank workflow run`): any graph whose tasks have commands, on this machine, under Surgetank
or bare.

`launch` → `surgetank run` → `inner` → `engine`; `journal` and `resume` let it continue after a kill.
"""
