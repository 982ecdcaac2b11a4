//! `POST /init` without the HTTP library.
//!
//! The first thing a restored guest does is to answer it, and under emulation the first use of each piece of code costs as much
//! as a thousand later ones: the library, its timers and the registration of the connection come to a third of the whole call.
//! So the request as the host sends it, whole and at once on a connection of its own, is answered right where the connection
//! is accepted. Everything else, every refusal included, is left for the library.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use nix::errno::Errno;

use super::configure;
use crate::state::State;

/// Longest request answered here; environments are rarely longer.
pub const MAX_REQUEST: usize = 16 << 10;
const MAX_HEADERS: usize = 16;
const START: &[u8] = b"POST /init HTTP/1.1\r\n";
const DONE: &[u8] = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n";

/// Makes a connection news only when its client has said something: that saves a wake-up, and a greeting is whole by then. A
/// connection whose client waits comes a second later.
///
/// # Errors
/// Those of `setsockopt(2)`.
pub fn expect_words(listener: &TcpListener) -> io::Result<()> {
    let seconds: libc::c_int = 1;
    let size = size_of_val(&seconds) as libc::socklen_t;
    let (fd, value) = (listener.as_raw_fd(), std::ptr::from_ref(&seconds).cast());
    // SAFETY: the option takes an int, which outlives the call.
    Errno::result(unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, value, size) })?;
    Ok(())
}

/// Answers the host's greeting. The connection comes back if it has brought anything else.
pub fn answer(stream: TcpStream, remote: IpAddr, state: &State, buffer: &mut [u8]) -> Option<TcpStream> {
    let Ok(length) = peek(&stream, buffer) else { return Some(stream) };
    let Some((body, token)) = parse(&buffer[..length]) else { return Some(stream) };
    if !state.is_host(remote) || !state.admits(token) {
        return Some(stream);
    }
    let Ok(rest) = configure::apply(body, state, None) else { return Some(stream) };
    // A few bytes on a new connection always fit; a client that has gone does not need them.
    let _ = send(&stream, DONE);
    rest.apply(state);
    // Closing a connection with unread data would reset it, and the answer with it.
    discard(&stream, length);
    None
}

/// The body and the token of a whole `POST /init` that ends its connection.
fn parse(request: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    if !request.starts_with(START) {
        return None;
    }
    let mut headers = [MaybeUninit::uninit(); MAX_HEADERS];
    let mut head = httparse::Request::new(&mut []);
    let Ok(httparse::Status::Complete(at)) = head.parse_with_uninit_headers(request, &mut headers) else { return None };
    let (mut length, mut closes, mut token) = (None, false, None);
    for header in head.headers.iter() {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        if is("content-length") {
            let value: usize = std::str::from_utf8(header.value).ok()?.parse().ok()?;
            if length.replace(value).is_some() {
                return None;
            }
        } else if is("connection") {
            closes = header.value == b"close";
        } else if is("x-access-token") {
            token = Some(header.value);
        } else if !is("host") && !is("content-type") {
            return None;
        }
    }
    let body = &request[at..];
    (closes && length == Some(body.len())).then_some((body, token))
}

fn peek(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: writes at most `buffer.len()` bytes into the buffer.
    let length = unsafe { libc::recv(stream.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) };
    Ok(Errno::result(length)?.unsigned_abs())
}

fn discard(stream: &TcpStream, length: usize) {
    // SAFETY: with MSG_TRUNC a TCP socket drops the bytes and writes nothing (tcp(7)).
    unsafe { libc::recv(stream.as_raw_fd(), std::ptr::null_mut(), length, libc::MSG_TRUNC | libc::MSG_DONTWAIT) };
}

fn send(stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: reads the bytes of a live slice.
    Errno::result(unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "POST /init HTTP/1.1\r\nHost: h\r\nConnection: close\r\n";

    #[test]
    fn a_whole_request_is_understood() {
        let request =
            format!("{HEAD}X-Access-Token: t\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}");
        assert_eq!(parse(request.as_bytes()), Some((&b"{}"[..], Some(&b"t"[..]))));
        for length in 0..request.len() {
            assert_eq!(parse(&request.as_bytes()[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn anything_else_is_left_to_the_library() {
        let length = "Content-Length: 2\r\n";
        for request in [
            format!("{HEAD}{length}\r\n{{}}more"),
            format!("{HEAD}{length}{length}\r\n{{}}"),
            format!("{HEAD}Content-Length: +2\r\nContent-Length: x\r\n\r\n{{}}"),
            format!("{HEAD}Transfer-Encoding: chunked\r\n{length}\r\n{{}}"),
            format!("{HEAD}Expect: 100-continue\r\n{length}\r\n{{}}"),
            format!("POST /init HTTP/1.1\r\nHost: h\r\n{length}\r\n{{}}"),
            format!("POST /init HTTP/1.0\r\nConnection: close\r\n{length}\r\n{{}}"),
            format!("GET /init HTTP/1.1\r\nConnection: close\r\n{length}\r\n{{}}"),
        ] {
            assert_eq!(parse(request.as_bytes()), None, "{request}");
        }
    }
}
