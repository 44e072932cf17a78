"""Forms: what browsers and curl send is read exactly, and nothing that could be read in two ways."""

from __future__ import annotations

from email.generator import BytesGenerator
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import CarpoolError, InvalidInput, TooLarge
from carpool.frontend.http.image_reading import MAX_PARTS, read_boundary, read_form

BOUNDARY = b"----x7"


def form(*parts: tuple[bytes, bytes], boundary: bytes = BOUNDARY, end: bytes = b"--\r\n") -> bytes:
    """Parts as (head without the last line end, data)."""
    written = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, data) for head, data in parts)
    return written + b"--" + boundary + end


def file_part(data: bytes, name: str = "file", file_name: str = "a.jpg") -> tuple[bytes, bytes]:
    head = (
        f'Content-Disposition: form-data; name="{name}"; filename="{file_name}"\r\nContent-Type: image/jpeg'
    )
    return head.encode(), data


def read(body: bytes, boundary: bytes = BOUNDARY) -> list[tuple[str, str | None, bytes]]:
    return [(part.name, part.file_name, bytes(part.data)) for part in read_form(body, boundary)]


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=8))
def test_parts_come_back_as_they_were(files: list[bytes]) -> None:
    found = read(form(*(file_part(data) for data in files)))
    assert [data for _, _, data in found] == files


def test_fields_files_and_quoted_names() -> None:
    body = form(
        (b'content-disposition: form-data; name="score"', b"0.5"),
        file_part(b"\xff\xd8", file_name='a \\"b\\".jpg'),
        (b"Content-Disposition: form-data; name=file; filename*=UTF-8''x.jpg", b"\r\n--"),
    )
    assert read(body) == [
        ("score", None, b"0.5"),
        ("file", 'a "b".jpg', b"\xff\xd8"),
        ("file", "UTF-8''x.jpg", b"\r\n--"),
    ]


def test_a_part_that_looks_like_another_boundary_is_data() -> None:
    data = b"--" + BOUNDARY + b"\r\n\r\n--other--\r\n"
    assert read(form(file_part(data)))[0][2] == data


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'multipart/form-data; charset=utf-8; boundary="a b?c"', b"a b?c"),
        (b"Multipart/Form-Data;boundary=----WebKitFormBoundary7", b"----WebKitFormBoundary7"),
    ],
)
def test_boundaries_are_read_from_the_content_type(content_type: bytes, boundary: bytes) -> None:
    assert read_boundary(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b'multipart/form-data; boundary="a\xe9"',
        b"multipart/form-data; boundary=a; boundary=b",
        b"multipart/form-data; boundary=" + b"a" * 71,
        b"multipart/form-data; boundary=a b",
    ],
)
def test_other_boundaries_are_refused(content_type: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_boundary(content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xd8",
        b"preamble\r\n" + form(file_part(b"x")),
        form(file_part(b"x"), end=b""),
        form(file_part(b"x"), end=b"x"),
        form(file_part(b"x"), end=b"--more"),
        form(file_part(b"x"))[:-8],
        form(),
        form((b"Content-Type: image/jpeg", b"x")),
        form((b"Content-Disposition: form-data", b"x")),
        form((b"Content-Disposition: attachment; name=file", b"x")),
        form((b"Content-Disposition: form-data; name=a; name=b", b"x")),
        form((b'Content-Disposition: form-data; name="a', b"x")),
        form((b"Content-Disposition: form-data; name=a\r\nContent-Disposition: form-data; name=b", b"x")),
        form((b"Content-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64", b"eA==")),
        form((b"no colon", b"x")),
        form((b"Content-Disposition: form-data; name=a; x=" + b"y" * 5000, b"x")),
    ],
)
def test_forms_that_could_mean_two_things_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        read(body)


def test_the_number_of_parts_is_bounded() -> None:
    assert len(read(form(*[file_part(b"x")] * MAX_PARTS))) == MAX_PARTS
    with pytest.raises(TooLarge):
        read(form(*[file_part(b"x")] * (MAX_PARTS + 1)))


@given(st.binary(max_size=400), st.data())
def test_whatever_comes_is_parts_or_an_error(noise: bytes, data: st.DataObject) -> None:
    body = bytearray(form(file_part(noise), (b'Content-Disposition: form-data; name="a"', b"1")))
    for _ in range(data.draw(st.integers(0, 6))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        for _, _, found in read(bytes(body)):
            assert found in bytes(body)
    except CarpoolError:
        pass


def test_a_form_that_the_standard_library_writes_is_read() -> None:
    from email.mime.application import MIMEApplication
    from email.mime.multipart import MIMEMultipart
    from email.policy import HTTP

    message = MIMEMultipart("form-data", boundary="abc")
    part = MIMEApplication(b"\x00\xff picture", _encoder=lambda _part: None)
    part.add_header("Content-Disposition", "form-data", name="file", filename="p.png")
    message.attach(part)
    file = BytesIO()
    BytesGenerator(file, policy=HTTP).flatten(message)
    body = file.getvalue().split(b"\r\n\r\n", 1)[1]
    assert read(body, b"abc") == [("file", "p.png", b"\x00\xff picture")]


def test_spaces_behind_a_boundary_are_few() -> None:
    start, rest = form(file_part(b"data")).split(b"\r\n", 1)
    assert read(start + b" \t" * 100 + b"\r\n" + rest) == [("file", "a.jpg", b"data")]
    with pytest.raises(InvalidInput, match="does not end its line"):
        read(start + b" " * 300 + b"\r\n" + rest)
