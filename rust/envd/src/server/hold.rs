//! The host's call to wait at the mailbox, just before it freezes the guest.
//!
//! A datagram that is not answered, because nothing of it is left then: a restored guest that still had a connection to close, or
//! a packet that was on its way out, would do that first. The host sees in the mailbox that we wait.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use tokio::net::UdpSocket;

use super::configure;
use crate::log;
use crate::machine::mailbox::Mailbox;
use crate::state::State;

/// What a call begins with; the rest of it is the access token.
const CALL: &[u8] = b"aenv-hold ";

/// Heeds calls for ever, if there is a mailbox.
///
/// # Errors
/// When the socket fails.
pub async fn serve(socket: UdpSocket, state: Arc<State>) -> io::Result<Infallible> {
    let Some(mailbox) = state.machine.as_ref().and_then(|machine| machine.mailbox.as_ref()) else {
        std::future::pending().await
    };
    let mut call = [0; 1 << 10];
    loop {
        let (length, remote) = socket.recv_from(&mut call).await?;
        let Some(token) = call[..length].strip_prefix(CALL) else { continue };
        if !state.is_host(remote.ip().to_canonical()) || !state.admits(Some(token)) {
            continue;
        }
        mailbox.hold();
        wait(mailbox, &state);
        // The host calls again while it sees nothing.
        while socket.try_recv_from(&mut call).is_ok() {}
    }
}

/// Waits for what the host may put into the mailbox before it lets this guest, or a copy of it, go on.
fn wait(mailbox: &Mailbox, state: &State) {
    let Some(words) = mailbox.wait() else { return };
    let outcome = configure::apply(&words, state, Some(mailbox));
    mailbox.answer(outcome.is_ok());
    match outcome {
        Ok(rest) => rest.apply(state),
        Err(error) => log!("the host's words are of no use: {error}"),
    }
}
