"""Folder that a user deploys: the model, a script that runs it as measured, a report and a manifest.

May import report, task_setup, graph and lower packages; must not import pipeline or cli.
"""
