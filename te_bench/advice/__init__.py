"""Advice on a model: what decides is measured, steps are predicted, the best are verified, and a sentence says which to use.

question = candidates.of_preset(...)    what may be chosen for a model on a device, and its trials
advise.advise(question, ...)            survey, whole steps, parts, predictions, verification: records
decision.decide(...)                    what the verified records say
answer, page                            in words, in JSON, as HTML
"""
