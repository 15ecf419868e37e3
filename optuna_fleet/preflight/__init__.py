"""The pre-flight check: does an objective give the same on several devices, and over moves?"""
