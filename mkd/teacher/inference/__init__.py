"""A teacher behind an inference server: vLLM and SGLang return log-probabilities of texts over HTTP, and vLLM can write
their hidden states to a folder.

http.py       addresses, and requests with bounds: size, time, no redirects, no proxies
scores.py     `TokenScores`: what a server returns for a text, checked, as targets of the cache's record format
apis.py       `VllmApi`, `SglangApi`: the requests and answers of each server
known_text.py `KnownText`: recognizes the weights of a teacher
pool.py       `ScoringPool`: threads that send texts to one or more servers, retry, and check that the weights stay
probe.py      requests before the first step: what the server must be able to do
texts.py      `TextStore`: records of texts in memory and, with --kd-teacher-cache, in a folder
teacher.py    `InferenceTeacher`: the `Teacher` of the most probable tokens

states_files.py    `StatesFolder`: files of hidden states, checked and removed
output_layer.py    `OutputLayer`: the final norm and the LM head of the served model's folder
states_model.py    `StatesModel`: requests for hidden states, compared with log-probabilities
states_teacher.py  `StatesTeacher`: the `Teacher` of hidden states
"""
