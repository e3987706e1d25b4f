"""Media by URL come from named hosts of the public internet alone, whole, within bounds, and without a redirect."""

import socket
from collections.abc import AsyncIterator
from ipaddress import ip_address

import pytest
from aiohttp import web

from stenograph.core.errors import InvalidRequest
from stenograph.http.fetch_media import Address, CheckedResolver, MediaFetcher, NotPublic, is_public
from tests.store_laws import medium

pytestmark = pytest.mark.timeout(600)

PICTURE = b"\x89PNG" * 1000
MOST = 2**20


@pytest.fixture
async def pictures() -> AsyncIterator[str]:
    """A server of pictures on this machine."""

    async def whole(_: web.Request) -> web.Response:
        return web.Response(body=PICTURE, content_type="image/png")

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:9/secret")

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "image/png"})
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"x" * 65536)
        except ConnectionError:
            return answer

    app = web.Application()
    app.add_routes([web.get("/a.png", whole), web.get("/to", elsewhere), web.get("/endless", endless)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://localhost:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_picture_of_a_named_host_is_fetched_whole(pictures: str) -> None:
    fetcher = MediaFetcher(["localhost"], most_bytes=MOST, allows=lambda _: True)
    url = f"{pictures}/a.png"
    fetched = await fetcher.fetch({url: "/messages/0"}, max_bytes=len(PICTURE))
    assert fetched == {url: medium(PICTURE, "image/png")}


async def test_the_pictures_of_a_request_are_bounded_together_as_its_body_is(pictures: str) -> None:
    places = {f"{pictures}/a.png?{number}": f"/messages/{number}" for number in range(4)}
    for most_bytes, is_taken in ((4 * len(PICTURE), True), (4 * len(PICTURE) - 1, False)):
        fetcher = MediaFetcher(["localhost"], most_bytes=most_bytes, allows=lambda _: True)
        if is_taken:
            assert len(await fetcher.fetch(places, max_bytes=len(PICTURE))) == 4
            continue
        with pytest.raises(InvalidRequest, match="--max-body-bytes"):
            await fetcher.fetch(places, max_bytes=len(PICTURE))


@pytest.mark.parametrize(
    ("path", "said"),
    [("/to", "status 302"), ("/absent", "status 404"), ("/endless", "more than 4000 bytes")],
)
async def test_nothing_else_is_taken(pictures: str, path: str, said: str) -> None:
    fetcher = MediaFetcher(["localhost"], most_bytes=MOST, allows=lambda _: True)
    with pytest.raises(InvalidRequest, match=said) as refused:
        await fetcher.fetch({pictures + path: "/messages/0/content/1"}, max_bytes=4000)
    assert refused.value.param == "/messages/0/content/1"


async def test_a_name_that_means_this_machine_is_not_connected_to(pictures: str) -> None:
    with pytest.raises(InvalidRequest, match="not an address of the public internet"):
        await MediaFetcher(["localhost"], most_bytes=MOST).fetch({f"{pictures}/a.png": "/x"}, max_bytes=9)
    with pytest.raises(NotPublic):
        await CheckedResolver(is_public).resolve("localhost", 80, socket.AF_INET)


class Names:
    """A name service with another answer to each question; the last one stays."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def __call__(self, host: str, family: socket.AddressFamily) -> list[str]:
        self.num_asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@pytest.mark.parametrize("private", ["10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "::ffff:192.168.0.1"])
@pytest.mark.parametrize("public_first", [True, False])
async def test_a_name_with_one_private_address_among_public_ones_is_refused(private: str, public_first: bool) -> None:
    """Whatever stands first: each address is asked about before any is connected to."""
    answer = ["93.184.216.34", private] if public_first else [private, "93.184.216.34"]
    names = Names(answer)
    with pytest.raises(NotPublic, match=private):
        await CheckedResolver(is_public, names).resolve("pictures.example", 80)
    fetcher = MediaFetcher(["pictures.example"], most_bytes=MOST, lookup=names)
    with pytest.raises(InvalidRequest, match=f"pictures.example is {private}") as refused:
        await fetcher.fetch({"http://pictures.example/a.png": "/x"}, max_bytes=9)
    assert refused.value.param == "/x"


async def test_a_name_is_looked_up_once_and_connected_to_where_it_was_checked(pictures: str) -> None:
    """A name whose answer changes a moment later (DNS rebinding) leads nowhere else, and is checked in each request."""
    url = pictures.replace("localhost", "pictures.example") + "/a.png"
    asked: list[Address] = []

    def allows(address: Address) -> bool:
        asked.append(address)
        return address == ip_address("127.0.0.1")

    names = Names(["127.0.0.1"], ["127.0.0.2"])
    fetcher = MediaFetcher(["pictures.example"], most_bytes=MOST, allows=allows, lookup=names)
    assert await fetcher.fetch({url: "/x"}, max_bytes=len(PICTURE)) == {url: medium(PICTURE, "image/png")}
    assert (names.num_asked, asked) == (1, [ip_address("127.0.0.1")])
    with pytest.raises(InvalidRequest, match=r"127\.0\.0\.2"):
        await fetcher.fetch({url: "/x"}, max_bytes=len(PICTURE))


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/a.png",
        "https://pictures.example@other.example/",
        "https://me@pictures.example/",
        "https://pictures.example:99999/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "https://pictures.example.other/",
        "http:///a",
    ],
)
async def test_a_url_of_another_host_is_refused_before_anything_is_asked(url: str) -> None:
    fetcher = MediaFetcher(["pictures.example", "127.0.0.1", "::1", "::ffff:127.0.0.1"], most_bytes=MOST)
    with pytest.raises(InvalidRequest):
        await fetcher.fetch({url: "/x"}, max_bytes=9)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("ff02::1", False),
        ("::7f00:1", False),
        ("::a9fe:a9fe", False),
        ("::ffff:0:7f00:1", False),
        ("fec0::1", False),
        ("3fff::1", False),
        ("5f00::1", False),
        ("2001:db8::1", False),
        ("64:ff9b::5db8:d822", True),
        ("168.63.129.16", False),
        ("192.88.99.1", False),
        ("240.0.0.1", False),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public
