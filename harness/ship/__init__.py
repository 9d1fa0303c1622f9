"""Folder that a user deploys: the model, a script that runs it as measured, a report and a manifest."""
