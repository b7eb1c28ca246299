"""Measure and predict steps of a model, verify the fastest, and say in one sentence which to use.

question = candidates.of_model(...)     the choices that apply to a model on a device, and their trials
advise.Run(question, ...).gather()      survey, whole steps, parts, predictions, verification: records
decision.decide(...)                    what the verified records say
answer, page                            the decision in words, in JSON, as HTML
"""
