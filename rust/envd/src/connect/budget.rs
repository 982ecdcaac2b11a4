//! How much memory large messages may take together, from their first byte until their handler is done with them.

use std::time::Duration;

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
        assert_eq!(waiting.await.expect("ran").expect("room").bytes(), MAX_MESSAGE);
    }
}
