"""A teacher behind an inference server (vLLM, SGLang) that returns log-probabilities of texts over HTTP.

http.py       addresses, and requests with bounds: size, time, no redirects, no proxies
scores.py     `TokenScores`: what a server returns for a text, checked, as targets of the cache's record format
apis.py       `VllmApi`, `SglangApi`: the requests and answers of each server
known_text.py `KnownText`: recognizes the weights of a teacher
pool.py       `ScoringPool`: threads that send texts to one or more servers, retry, and check that the weights stay
probe.py      requests before the first step: what the server must be able to do
texts.py      `TextStore`: records of texts in memory and, with --kd-teacher-cache, in a folder
teacher.py    `InferenceTeacher`: the `Teacher`
"""
