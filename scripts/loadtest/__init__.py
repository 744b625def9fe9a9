"""`millpond loadtest`: load on any OpenAI-compatible server, and what it did to it.

plan says what to send and when, client sends it, reply judges what came, figures sums up, table and page show it. Only
client, runner and command know sockets and clocks. The benchmarks use the same parts, so that there is one HTTP client.
"""
