"""Texts that inference servers (vLLM, SGLang) write with the student's weights (--kd-rollout-url).

apis.py       `VllmWriting`, `SglangWriting`: the requests of each server, and its answers, checked
find.py       finds the servers before the first step
server.py     `StudentServer`: one server: its weights are loaded and compared with the student's, and it writes texts
sharing.py    `SharedTexts`: threads that divide the texts of a rollout among servers, and send lost ones again
text_files.py `TextFiles`: the texts of the latest rollouts, for a job that is killed
weights.py    `WeightFolders`: the folders from which servers load the student's weights
writer.py     `ServedWriter`: refreshes the weights and has the texts of a rollout written, on all ranks together
"""
