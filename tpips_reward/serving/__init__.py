"""The reward over HTTP: a server with dynamic batching (extra `serve`), and the client `remote:http://host:port`.

    tpips-reward serve --reward tpips:preserve --port 8000
    RemoteReward("remote:http://gpu-3:8000")

`client.py` needs no extra; nothing is imported here, so that the command line stays quick.
"""
