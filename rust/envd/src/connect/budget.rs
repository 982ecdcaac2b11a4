//! How much memory large messages may take together, from their first byte until their handler is done with them.

use std::time::Duration;

use memchr::memchr_iter;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::MAX_MESSAGE;
use crate::error::RpcError;
use crate::memory;

/// Bytes of all large messages at one time. Decoding one, which happens one at a time, takes about twice its size on top for
/// a moment.
const TOTAL: usize = 2 * MAX_MESSAGE;

/// Messages up to this size are free: the number of connections bounds them.
pub const FREE: usize = 64 << 10;

/// What a decoded string costs on top of its text: itself, its block, and the same again for a program's arguments. A message
/// of `"",` three bytes long each would grow thirtyfold.
const STRING: usize = 104;

/// Messages with fewer strings are not charged for them.
const FREE_STRINGS: usize = 10_000;

/// How long a large message waits for others before its call is refused.
const WAIT: Duration = Duration::from_secs(10);

static BYTES: Semaphore = Semaphore::const_new(TOTAL);

/// A share of the budget, given back when dropped.
#[derive(Debug, Default)]
pub struct Share(Option<SemaphorePermit<'static>>);

impl Share {
    /// A share for a message of `bytes`; waits for it, while the message waits in the connection.
    ///
    /// # Errors
    /// `resource_exhausted` when other messages took everything for ten seconds.
    pub async fn of(bytes: usize) -> Result<Self, RpcError> {
        if bytes <= FREE {
            return Ok(Self(None));
        }
        match timeout(WAIT, BYTES.acquire_many(permits(bytes))).await {
            Ok(Ok(permit)) => Ok(Self(Some(permit))),
            _ => Err(RpcError::resource_exhausted(format!(
                "other messages take all {} MiB there are for large ones; try again, or send bulk data through /files",
                TOTAL >> 20
            ))),
        }
    }

    /// Adds what decoding `message` will cost for its strings, if they are many. Does not wait: who waits while it holds a share
    /// may wait for one who does the same.
    ///
    /// # Errors
    /// `resource_exhausted` when there is not as much.
    pub fn add_strings(&mut self, message: &[u8]) -> Result<(), RpcError> {
        let strings = memchr_iter(b'"', message).count() / 2;
        if strings <= FREE_STRINGS {
            return Ok(());
        }
        let wanted = u32::try_from(strings.saturating_mul(STRING)).unwrap_or(u32::MAX);
        let Ok(permit) = BYTES.try_acquire_many(wanted) else {
            return Err(RpcError::resource_exhausted(format!(
                "a message of {strings} strings takes more than is left of the {} MiB for large messages",
                TOTAL >> 20
            )));
        };
        match &mut self.0 {
            Some(held) => held.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, SemaphorePermit::num_permits)
    }

    /// Gives back what is more than `bytes`.
    pub fn shrink(&mut self, bytes: usize) {
        let surplus = self.bytes().saturating_sub(bytes);
        if let Some(permit) = &mut self.0 {
            drop(permit.split(surplus));
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.0.take().is_some() && BYTES.available_permits() == TOTAL {
            memory::give_back();
        }
    }
}

fn permits(bytes: usize) -> u32 {
    u32::try_from(bytes.min(TOTAL)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn large_messages_wait_for_each_other_and_small_ones_do_not() {
        let mut first = Share::of(MAX_MESSAGE).await.expect("free");
        let second = Share::of(MAX_MESSAGE).await.expect("free");
        assert_eq!(Share::of(FREE).await.expect("small").bytes(), 0);
        let refused = Share::of(FREE + 1).await.expect_err("full");
        assert_eq!(refused.code, crate::error::Code::ResourceExhausted);
        first.shrink(FREE);
        assert_eq!(Share::of(MAX_MESSAGE - FREE).await.expect("room").bytes(), MAX_MESSAGE - FREE);
        let waiting = tokio::spawn(Share::of(MAX_MESSAGE));
        tokio::task::yield_now().await;
        drop(second);
        let mut last = waiting.await.expect("ran").expect("room");
        assert_eq!(last.bytes(), MAX_MESSAGE);
        last.add_strings(&br#""","#.repeat(FREE_STRINGS)).expect("few");
        last.add_strings(&br#""","#.repeat(100_000)).expect("room");
        assert_eq!(last.bytes(), MAX_MESSAGE + 100_000 * STRING);
        assert!(last.add_strings(&br#""","#.repeat(1_000_000)).is_err());
    }
}
