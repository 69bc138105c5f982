"""A command that computes nothing itself, as `ssh -L`: `python -m tests.support.forward PORT TO`."""

import asyncio
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while found := await reader.read(1 << 16):
        writer.write(found)
    writer.close()


async def main(port: int, to: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
