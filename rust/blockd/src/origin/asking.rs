//! Credentials that somebody else supplies when asked.

use tokio::sync::broadcast::{self, error::RecvError};

use super::credentials::{Credentials, Headers, RefreshFuture};

/// Supplies that may be on their way to those that wait.
const PENDING: usize = 64;

/// Tells somebody which URL needs new headers, and waits until they come: the event `credentials` of the control socket and
/// the operation of the same name.
pub struct AskingCredentials {
    ask: Box<dyn Fn(&str) -> bool + Send + Sync>,
    supplied: broadcast::Sender<(String, Headers)>,
}

impl AskingCredentials {
    /// `ask` is called with the URL, from any thread, and must not block; false if nobody is there to be asked.
    pub fn new(ask: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self { ask: Box::new(ask), supplied: broadcast::channel(PENDING).0 }
    }

    /// Gives headers to all that wait for those of a URL that starts with `url_prefix`.
    pub fn supply(&self, url_prefix: &str, headers: &Headers) {
        // An error says that nobody waits.
        let _ = self.supplied.send((url_prefix.to_owned(), headers.clone()));
    }
}

impl Credentials for AskingCredentials {
    fn refresh(&self, url: &str) -> RefreshFuture {
        let mut supplied = self.supplied.subscribe();
        if !(self.ask)(url) {
            return Box::pin(std::future::ready(Err("nobody is subscribed to be asked".to_owned())));
        }
        let url = url.to_owned();
        Box::pin(async move {
            loop {
                match supplied.recv().await {
                    Ok((prefix, headers)) if url.starts_with(&prefix) => return Ok(headers),
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return Err("the daemon is ending".to_owned()),
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn who_waits_gets_the_headers_of_its_url() {
        let asked = Arc::new(std::sync::Mutex::new(Vec::new()));
        let log = asked.clone();
        let credentials = AskingCredentials::new(move |url| {
            log.lock().unwrap().push(url.to_owned());
            !url.contains("nobody")
        });
        let waiting = credentials.refresh("https://a/x?q=1");
        let token = |value: &str| Headers::new([("authorization", value)]).unwrap();
        credentials.supply("https://b/", &token("wrong"));
        credentials.supply("https://a/", &token("right"));
        let headers = waiting.await.unwrap();
        assert_eq!(headers.map().get("authorization").unwrap(), "right");
        assert_eq!(*asked.lock().unwrap(), ["https://a/x?q=1"]);
        assert!(credentials.refresh("https://nobody/").await.is_err());
        let waiting = credentials.refresh("https://a/");
        drop(credentials);
        assert!(waiting.await.is_err());
    }
}
