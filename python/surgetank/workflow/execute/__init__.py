"""The local executor (`surgetank workflow run`): any graph whose tasks have commands, on this machine, under Surgetank or bare.

`launch` → `surgetank run` → `inner` → `engine`; `journal` and `resume` are what makes it go on after a kill.
"""
